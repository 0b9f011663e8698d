#include "launch.h"

#include <algorithm>
#include <bit>

#include "../../dispatch_element.h"
#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {
namespace {

template <typename T>
void launch(const AttnBwdParams& p, cudaStream_t stream) {
  constexpr AttnBwdPrepareConfig kConfig = kAttnBwdPrepareConfig;
  const auto aligned = [&](const TensorView& t) {
    return rows_aligned(t, p.batch, p.heads_q, p.len_q, kConfig.vector_bytes);
  };
  const uint64_t row_bytes = p.dim_v * sizeof(T);
  const bool vectorised =
      row_bytes % kConfig.vector_bytes == 0 && aligned(p.out) && aligned(p.grad_out);
  // Single elements: as many a thread as a vector has.
  const uint64_t lane_bytes = kConfig.vector_bytes * (vectorised ? kConfig.thread_vectors : 1);
  const uint64_t lanes = std::bit_ceil((row_bytes + lane_bytes - 1) / lane_bytes);
  const AttnBwdPrepareRows rows{std::clamp(static_cast<int>(lanes), kConfig.min_lanes, 32),
                                vectorised};
  const int64_t blocks = padded_heads(p) * (padded_rows(p) / kRowPad);
  if (blocks == 0 || p.batch == 0) return;
  launch_kernel<attn_bwd_prepare_kernel<T>>(blocks, kConfig.block_threads, 0, stream, p, rows);
}

}  // namespace

void launch_attn_bwd_prepare(const AttnBwdParams& p, cudaStream_t stream) {
  dispatch_element(p.q.dtype, [&](auto tag) { launch<typename decltype(tag)::Type>(p, stream); });
}

}  // namespace flashbpt::sm80
