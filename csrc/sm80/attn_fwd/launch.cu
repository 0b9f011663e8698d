// Chooses the kernel of a call and what its blocks do.
#include <algorithm>
#include <iterator>

#include "../../dispatch_element.h"
#include "config.h"
#include "launch.h"
#include "schedule.h"

namespace flashbpt::sm80 {

template <typename T>
void launch_attn_fwd_typed(size_t row, const AttnFwdKernelParams& p, cudaStream_t stream);

namespace {

// The first row that fits: no more terms than it takes, tall before short, narrow before wide.
size_t choose_row(const AttentionParams& p, const DeviceLimits& device) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  const int64_t heads = (p.packed() ? 1 : p.batch) * p.heads_q;
  const auto score = [&](const AttnFwdKernel& k) -> int64_t {
    const AttnFwdConfig& c = k.config;
    if (k.dtype != p.q.dtype) return -1;
    if (c.smem_bytes(mask_element_bytes(p)) > device.smem_bytes) return -1;
    const Terms terms = dim > c.head_dim ? Terms::kAll : terms_of(p);
    if (!serves(k.terms, terms)) return -1;
    int64_t points = 10;
    // One slice, and no wider than it has to be.
    if (dim <= c.head_dim)
      points += 1000000 - c.head_dim * 100;
    else
      points += c.head_dim * 100;
    // Half a tile of rows, or too few blocks for the device: short ones fill it better.
    const int64_t tall_blocks = heads * ceil_div(p.len_q, 128);
    const bool few = p.len_q <= 64 || tall_blocks < device.multiprocessors;
    if (k.short_rows == few) points += 10;
    points -= static_cast<int>(k.terms) - static_cast<int>(terms);
    return points;
  };
  size_t best = 0;
  for (size_t row = 0; row < std::size(kAttnFwdKernels); ++row)
    if (score(kAttnFwdKernels[row]) > score(kAttnFwdKernels[best])) best = row;
  return best;
}

int64_t query_tiles(const AttentionParams& p, int block_q) {
  return ceil_div(p.len_q, block_q) + (p.packed() ? p.batch : 0);
}

int64_t all_heads(const AttentionParams& p) {
  return (p.packed() ? 1 : p.batch) * p.heads_q;
}

}  // namespace

const char* attn_fwd_kernel(const AttentionParams& p, const DeviceLimits& device) {
  return kAttnFwdKernels[choose_row(p, device)].name;
}

int attn_fwd_splits(const AttentionParams& p, const DeviceLimits& device) {
  // lse_lo of a part would be lost in the merge; the length of packed keys is not known here.
  if (p.packed() || (p.mask && !p.boolean_mask())) return 1;
  const AttnFwdConfig& c = kAttnFwdKernels[choose_row(p, device)].config;
  const int64_t blocks = query_tiles(p, c.block_q) * all_heads(p) * ceil_div(p.dim_v, c.head_dim);
  const int64_t slots = int64_t{device.multiprocessors} * c.min_blocks;
  const int64_t key_tiles = ceil_div(p.len_k, c.block_k);
  if (blocks <= 0 || blocks * 2 > slots) return 1;
  // Four tiles a part at least: a part costs a merge.
  return static_cast<int>(std::clamp<int64_t>(std::min(slots / blocks, key_tiles / 4), 1, 64));
}

void launch_attn_fwd(const AttnFwdParams& params, const DeviceLimits& device, cudaStream_t stream) {
  const size_t row = choose_row(params, device);
  const AttnFwdConfig& c = kAttnFwdKernels[row].config;
  AttnFwdKernelParams p;
  static_cast<AttnFwdParams&>(p) = params;
  const int64_t batch = p.packed() ? 1 : p.batch;
  const TensorView& out = p.splits.count > 1 ? p.splits.out : p.out;
  p.access = {
      row_access(p.q, batch, p.heads_q, p.len_q), row_access(p.k, batch, p.heads_kv, p.len_k),
      row_access(p.v, batch, p.heads_kv, p.len_k), row_access(out, batch, p.heads_q, p.len_q),
      p.mask ? row_access(p.mask, batch, p.heads_q, p.len_q) : 0};
  p.slices_qk = static_cast<int>(ceil_div(p.dim, c.head_dim));
  p.heads = Divisor(p.heads_q);
  p.group_heads = Divisor(p.group());
  p.key_parts = Divisor(p.splits.count);
  p.slices_v = Divisor(ceil_div(p.dim_v, c.head_dim));
  p.score = score_unit(p);
  const int64_t kv_bytes = p.len_k * (p.dim + p.dim_v) * element_bytes(p.q.dtype);
  p.order = TileOrder::make(query_tiles(p, c.block_q), all_heads(p), p.group(), kv_bytes,
                            device.l2_bytes / 2, p.band.right != Band::kNoLimit, 0);
  if (p.order.count() == 0) return;
  dispatch_element(p.q.dtype, [&](auto tag) {
    launch_attn_fwd_typed<typename decltype(tag)::Type>(row, p, stream);
  });
}

}  // namespace flashbpt::sm80
