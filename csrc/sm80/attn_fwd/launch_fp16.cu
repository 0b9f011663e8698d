#include "launch_kernels.cuh"

namespace flashbpt::sm80 {

template void launch_attn_fwd_typed<__half>(size_t, const AttnFwdKernelParams&, cudaStream_t);

}  // namespace flashbpt::sm80
