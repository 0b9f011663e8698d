#include "launch.h"

#include "../../dispatch_element.h"
#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {
namespace {

template <typename T>
void launch(const AttnBwdParams& p, cudaStream_t stream) {
  constexpr AttnBwdFinishConfig kConfig = kAttnBwdFinishConfig;
  const bool vectorised = rows_aligned(p.dq, p.batch, p.heads_q, p.len_q, kConfig.vector_bytes);
  const int64_t blocks = padded_heads(p) * (padded_rows(p) / kRowPad);
  if (blocks == 0 || p.batch == 0) return;
  launch_kernel<attn_bwd_finish_kernel<T>>(blocks, kConfig.block_threads, 0, stream, p, vectorised);
}

}  // namespace

void launch_attn_bwd_finish(const AttnBwdParams& p, cudaStream_t stream) {
  dispatch_element(p.q.dtype, [&](auto tag) { launch<typename decltype(tag)::Type>(p, stream); });
}

}  // namespace flashbpt::sm80
