#include "launch.h"

#include "kernel.cuh"

namespace flashbpt::sm80 {
namespace {

template <typename T>
void launch(const AttnBwdParams& p, cudaStream_t stream) {
  constexpr AttnBwdFinishConfig kConfig = kAttnBwdFinishConfig;
  const bool vectorised = rows_aligned(p.dq, p.batch, p.heads_q, p.len_q, kConfig.vector_bytes);
  const int64_t blocks = padded_heads(p) * (padded_rows(p) / kRowPad);
  if (blocks == 0 || p.batch == 0) return;
  attn_bwd_finish_kernel<T>
      <<<static_cast<unsigned>(blocks), kConfig.block_threads, 0, stream>>>(p, vectorised);
}

}  // namespace

void launch_attn_bwd_finish(const AttnBwdParams& p, cudaStream_t stream) {
  switch (p.q.dtype) {
    case DataType::kFloat32:
      return launch<float>(p, stream);
    case DataType::kBFloat16:
      return launch<__nv_bfloat16>(p, stream);
    case DataType::kFloat16:
      return launch<__half>(p, stream);
    case DataType::kFloat64:
    case DataType::kBool:
      break;
  }
}

}  // namespace flashbpt::sm80
