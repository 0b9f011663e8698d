#include "launch_kernels.cuh"

namespace flashbpt::sm80 {

void launch_paged_decode_e5m2(const PagedDecodeParams& p, cudaStream_t stream) {
  launch_paged_decode_of<CacheType::kFp8E5m2, DataType::kFloat16>(p, stream);
}

}  // namespace flashbpt::sm80
