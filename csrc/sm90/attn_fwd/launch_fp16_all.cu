#include "launch_kernels.cuh"

namespace flashbpt::sm90 {

template void launch_attn_fwd_typed<__half, Extras::kAll>(size_t, const AttnFwdKernelParams&, int,
                                                          cudaStream_t);

}  // namespace flashbpt::sm90
