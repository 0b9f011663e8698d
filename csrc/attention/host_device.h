// Marks what the CPU backend and the CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define FLASHBPT_HOST_DEVICE __host__ __device__
#else
#define FLASHBPT_HOST_DEVICE
#endif
