// Barriers between the blocks of one kernel.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>

namespace flashbpt {

constexpr int64_t kStreamBarriers = 4096;

// kStreamBarriers words of device memory that are zero, for a kernel that leaves them so. Kernels
// on one stream share them, since they run one after the other. What a graph captures has its own
// for as long as the graph lives, since it may run beside anything else; launches of one graph,
// from one executable or several, must not overlap, nor may clones of it as branches of another.
int32_t* stream_barriers(c10::cuda::CUDAStream stream);

}  // namespace flashbpt
