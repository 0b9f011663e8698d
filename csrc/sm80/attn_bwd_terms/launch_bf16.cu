#include "launch_kernels.cuh"

namespace flashbpt::sm80 {

template void launch_attn_bwd_terms_typed<__nv_bfloat16>(size_t, const AttnBwdTermsKernelParams&,
                                                         cudaStream_t);

}  // namespace flashbpt::sm80
