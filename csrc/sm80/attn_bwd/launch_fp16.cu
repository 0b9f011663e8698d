#include "launch_kernels.cuh"

namespace flashbpt::sm80 {

template void launch_attn_bwd_typed<__half>(size_t, const AttnBwdKernelParams&, cudaStream_t);

}  // namespace flashbpt::sm80
