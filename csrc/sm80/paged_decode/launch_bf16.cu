#include "launch_kernels.cuh"

namespace flashbpt::sm80 {

void launch_paged_decode_bf16(const PagedDecodeParams& p, cudaStream_t stream) {
  launch_paged_decode_of<CacheType::kSame, DataType::kBFloat16>(p, stream);
}

}  // namespace flashbpt::sm80
