#include "launch_kernels.cuh"

namespace flashbpt::sm80 {

void launch_paged_prefill_bf16(size_t row, unsigned blocks, const PagedPrefillKernelParams& p,
                               cudaStream_t stream) {
  launch_paged_prefill_typed<__nv_bfloat16>(row, blocks, p, stream);
}

}  // namespace flashbpt::sm80
