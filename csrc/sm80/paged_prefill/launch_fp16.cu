#include "launch_kernels.cuh"

namespace flashbpt::sm80 {

void launch_paged_prefill_fp16(size_t row, unsigned blocks, const PagedPrefillKernelParams& p,
                               cudaStream_t stream) {
  launch_paged_prefill_typed<__half>(row, blocks, p, stream);
}

}  // namespace flashbpt::sm80
