// Chooses the kernel of a call and how the gradients are cut into pieces.
#include <algorithm>
#include <utility>

#include "../../dispatch_element.h"
#include "../attn_bwd/choose_row.h"
#include "config.h"
#include "launch.h"
#include "schedule.h"

namespace flashbpt::sm80 {

template <typename T>
void launch_attn_bwd_terms_typed(size_t row, const AttnBwdTermsKernelParams& p,
                                 cudaStream_t stream);

namespace {

// One piece a tile of the scores; the caller adds the gradient and where it is broadcast.
AttnBwdTermsKernelParams kernel_params(const AttnBwdParams& params, const AttnBwdConfig& c) {
  AttnBwdTermsKernelParams p{};
  static_cast<AttnBwdParams&>(p) = params;
  const int64_t batch = p.packed() ? 1 : p.batch;
  p.access = {row_access(p.q, batch, p.heads_q, p.len_q),
              row_access(p.k, batch, p.heads_kv, p.len_k),
              row_access(p.v, batch, p.heads_kv, p.len_k), 0,
              p.mask ? row_access(p.mask, batch, p.heads_q, p.len_q) : 0};
  p.access_grad_out = row_access(p.grad_out, batch, p.heads_q, p.len_q);
  p.slices = Divisor(ceil_div(std::max(p.dim, p.dim_v), c.head_dim));
  p.needs_ds = p.dq_acc || p.dk || p.dmask || p.dalibi;
  p.score = score_unit(p);
  p.group_heads = static_cast<uint32_t>(p.group());
  const auto count = [](int64_t n) { return static_cast<uint32_t>(n); };
  p.pieces = {count(batch), count(p.heads_q), count(ceil_div(p.len_q, c.block_q)),
              count(key_tiles(p, c))};
  p.sums = {1, 1, 1, 1};
  p.splits = 1;
  return p;
}

void launch(size_t row, const AttnBwdTermsKernelParams& p, cudaStream_t stream) {
  if (p.blocks() == 0) return;
  dispatch_element(p.q.dtype, [&](auto tag) {
    launch_attn_bwd_terms_typed<typename decltype(tag)::Type>(row, p, stream);
  });
}

}  // namespace

int64_t attn_bwd_terms_partials(const AttentionParams& p, const DeviceLimits& device) {
  return key_tiles(p, kAttnBwdTermsKernels[choose_row(kAttnBwdTermsKernels, p, device)].config);
}

void launch_attn_bwd_terms(const AttnBwdParams& params, const DeviceLimits& device,
                           cudaStream_t stream) {
  const size_t row = choose_row(kAttnBwdTermsKernels, params, device);
  const AttnBwdConfig& c = kAttnBwdTermsKernels[row].config;
  if (params.dmask) {
    AttnBwdTermsKernelParams p = kernel_params(params, c);
    p.grad = p.dmask;
    p.grad_pairs = row_access(p.dmask, p.batch, p.heads_q, p.len_q) >= 8;
    if (p.grad.batch == 0) std::swap(p.pieces.batch, p.sums.batch);
    if (p.grad.head == 0) std::swap(p.pieces.head, p.sums.head);
    if (p.grad.row == 0) std::swap(p.pieces.row, p.sums.row);
    if (p.grad.col == 0) std::swap(p.pieces.col, p.sums.col);
    // The mask may be small where its sums are long.
    const int64_t blocks = p.blocks(), slots = int64_t{device.multiprocessors} * c.min_blocks;
    if (!p.deterministic && 0 < blocks && blocks < slots)
      p.splits = std::min(static_cast<uint32_t>(slots / blocks), p.visits());
    launch(row, p, stream);
  }
  if (params.dalibi) {
    AttnBwdTermsKernelParams p = kernel_params(params, c);
    p.grad = {p.dalibi.data, p.dalibi.dtype, p.dalibi.batch, p.dalibi.head, 0, 0};
    p.partial_stride = p.dalibi.row;
    p.of_alibi = true;
    std::swap(p.pieces.row, p.sums.row);
    launch(row, p, stream);
  }
}

}  // namespace flashbpt::sm80
