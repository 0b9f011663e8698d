// Chooses the kernel of a call and what its blocks do.
#include <algorithm>

#include "../../dispatch_element.h"
#include "choose_row.h"
#include "config.h"
#include "launch.h"
#include "schedule.h"

namespace flashbpt::sm80 {

template <typename T>
void launch_attn_bwd_typed(size_t row, const AttnBwdKernelParams& p, cudaStream_t stream);

namespace {

int64_t all_kv_heads(const AttentionParams& p) {
  return (p.packed() ? 1 : p.batch) * p.heads_kv;
}

int64_t slices_of(const AttentionParams& p, const AttnBwdConfig& c) {
  return ceil_div(std::max(p.dim, p.dim_v), c.head_dim);
}

}  // namespace

const char* attn_bwd_kernel(const AttentionParams& p, const DeviceLimits& device) {
  return kAttnBwdKernels[choose_row(kAttnBwdKernels, p, device)].name;
}

int attn_bwd_q_splits(const AttentionParams& p, const DeviceLimits& device) {
  const AttnBwdConfig& c = kAttnBwdKernels[choose_row(kAttnBwdKernels, p, device)].config;
  const int64_t blocks = key_tiles(p, c) * all_kv_heads(p) * slices_of(p, c);
  const int64_t slots = int64_t{device.multiprocessors} * c.min_blocks;
  const int64_t steps = ceil_div(p.len_q, c.block_q);
  if (blocks <= 0 || blocks * 2 > slots) return 1;
  // Four steps a block at least: a split costs fp32 sums of dK and dV.
  return static_cast<int>(std::clamp<int64_t>(std::min(slots / blocks, steps / 4), 1, 64));
}

void launch_attn_bwd(const AttnBwdParams& params, const DeviceLimits& device, cudaStream_t stream) {
  const size_t row = choose_row(kAttnBwdKernels, params, device);
  const AttnBwdConfig& c = kAttnBwdKernels[row].config;
  AttnBwdKernelParams p{};
  static_cast<AttnBwdParams&>(p) = params;
  const int64_t batch = p.packed() ? 1 : p.batch;
  const auto access = [&](const TensorView& t, int64_t heads, int64_t rows) {
    return t ? row_access(t, batch, heads, rows) : 0;
  };
  p.access = {access(p.q, p.heads_q, p.len_q), access(p.k, p.heads_kv, p.len_k),
              access(p.v, p.heads_kv, p.len_k), 0, access(p.mask, p.heads_q, p.len_q)};
  p.access_grad_out = access(p.grad_out, p.heads_q, p.len_q);
  p.access_dk = access(p.dk, p.heads_kv, p.len_k);
  p.access_dv = access(p.dv, p.heads_kv, p.len_k);
  p.slices = Divisor(slices_of(p, c));
  const auto chunks = [&](const TensorView& t) {
    const int64_t last =
        (batch - 1) * t.batch + (p.heads_q - 1) * t.head + (p.len_q - 1) * t.row + c.head_dim;
    return last * element_bytes(t.dtype) / 16;
  };
  p.whole_rows = p.access.q == 16 && p.access_grad_out == 16 && p.dim == c.head_dim &&
                 p.dim_v == c.head_dim && std::max(chunks(p.q), chunks(p.grad_out)) < UINT32_MAX;
  if (p.whole_rows) {
    p.q_row_chunks = static_cast<uint32_t>(p.q.row * element_bytes(p.q.dtype) / 16);
    p.grad_out_row_chunks = static_cast<uint32_t>(p.grad_out.row * element_bytes(p.q.dtype) / 16);
  }
  p.dq_pieces = static_cast<uint32_t>(dq_acc_pieces(p.dim));
  p.needs_ds = p.dq_acc || p.dk || p.dmask || p.dalibi;
  p.group_heads = static_cast<uint32_t>(p.group());
  p.kv_heads = Divisor(p.heads_kv);
  p.row_parts = Divisor(p.q_splits);
  p.score = score_unit(p);
  const int64_t q_bytes = p.len_q * (p.dim + p.dim_v) * element_bytes(p.q.dtype) * p.group();
  // The first keys of a causal call are seen by the most rows.
  p.order = TileOrder::make(key_tiles(p, c), all_kv_heads(p), 1, q_bytes, device.l2_bytes / 2,
                            /*last_first=*/false, 0);
  if (p.order.count() == 0) return;
  dispatch_element(p.q.dtype, [&](auto tag) {
    launch_attn_bwd_typed<typename decltype(tag)::Type>(row, p, stream);
  });
}

}  // namespace flashbpt::sm80
