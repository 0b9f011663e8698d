// Chooses the kernel of a call and what its blocks do.
#include "launch.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <numeric>

#include "../../attention/mask_terms.h"
#include "../../dispatch_element.h"
#include "../../row_access.h"
#include "../../tile/tensor_map.h"
#include "config.h"
#include "schedule.h"

namespace flashbpt::sm90 {

template <typename T, Extras kUnit>
void launch_attn_fwd_typed(size_t row, const AttnFwdKernelParams& p, int blocks,
                           cudaStream_t stream);

namespace {

constexpr int64_t kLargestDim = 256;
constexpr int64_t kCacheParts = 3;  // of the L2 cache one is for the keys of a section
constexpr int kMostCopyingWarps = 4;
constexpr int64_t kFewKeys = 1024;  // of a sequence on average
constexpr const char* kRefusedStrides =
    "its copies want unit columns, addresses and strides that are multiples of 16 bytes, no row "
    "that is broadcast";

size_t row_with(const AttentionParams& p, Extras extras) {
  const auto serves = [&](const AttnFwdKernel& k) {
    return k.dtype == p.q.dtype && k.extras == extras && k.config.head_dim >= p.dim &&
           k.config.dim_v >= p.dim_v;
  };
  return std::find_if(std::begin(kAttnFwdKernels), std::end(kAttnFwdKernels), serves) -
         kAttnFwdKernels;
}

Extras extras_of(const AttentionParams& p) {
  const ScoreUnit score = score_unit(p);
  const bool terms = p.softcap > 0 || p.alibi || score.sign != 1.0f;
  if ((p.dropout_threshold > 0 && !p.drops_all()) || (p.mask && terms)) return Extras::kAll;
  if (p.mask) return Extras::kMasks;
  if (terms) return Extras::kTerms;
  const int64_t keys = p.packed() ? p.len_k / std::max<int64_t>(p.batch, 1) : p.len_k;
  return keys <= kFewKeys && std::max(p.dim, p.dim_v) <= 64 ? Extras::kShort : Extras::kNone;
}

// Strides of dimensions of size 1 do not matter; rows that are all the same have no stride to step
// by.
bool has_map(const TensorView& t, int64_t batch, int64_t heads, int64_t rows) {
  return t.col == 1 && row_access(t, batch, heads, rows) >= 16 && (rows <= 1 || t.row > 0);
}

// Where all tiles are equally long, those of one head (of one group) run together, so that few keys
// are in use at once; else the longest of as many heads as fit the cache, and last of all the
// shortest of all heads: as many as keep the device busy for as long as the longest tile takes.
// Boolean masks are taken for causal ones.
TileOrder order_of(const AttnFwdKernelParams& p, const AttnFwdConfig& c,
                   const DeviceLimits& device) {
  const int64_t tiles = ceil_div(p.len_q, c.block_q()), heads = p.batch * p.heads_q;
  if (p.packed()) {
    return TileOrder::make(tiles + p.batch, p.heads_q, p.heads_q, 1, 0, true, 0);
  }
  const bool causal = p.band.right != Band::kNoLimit && p.band.left == Band::kNoLimit;
  if (!causal && !p.boolean_mask()) {
    return TileOrder::make(tiles, heads, p.group(), 1, 0, true, 0);
  }
  // In keys: a tile's, and what it costs besides.
  const auto cost = [&](int64_t tile) {
    const int64_t last = std::min((tile + 1) * c.block_q(), p.len_q) - 1;
    return (causal ? p.keys.end(static_cast<int>(last)) : last * p.len_k / p.len_q) + 320;
  };
  int64_t late = 0, late_cost = 0;
  const int64_t wanted = device.multiprocessors * cost(tiles - 1) / heads;
  while (late < tiles - 1 && late_cost < wanted) late_cost += cost(late++);
  const int64_t kv_bytes = p.len_k * (p.dim + p.dim_v) * element_bytes(p.q.dtype);
  return TileOrder::make(tiles, heads, p.group(), kv_bytes, device.l2_bytes / kCacheParts, true,
                         late);
}

// Why the kernels do not serve a call, whatever its keys lie in. extras: what the call has.
const char* refusal(const AttentionParams& p, Extras extras, int64_t len_k,
                    const DeviceLimits& device) {
  if (p.dim % 8 != 0 || p.dim_v % 8 != 0 || std::max(p.dim, p.dim_v) > kLargestDim) {
    return "it takes head dims that are multiples of 8 up to 256";
  }
  if (kAttnFwdKernels[row_with(p, extras)].config.smem_bytes() > device.smem_bytes) {
    return "its tiles want more shared memory than the GPU has";
  }
  if (std::max(p.len_q, len_k) >= RowKeys::kFar) return "it takes lengths below 2^30 - 1024";
  if (len_k == 0) return "it takes at least one key";
  const int64_t sequences = p.packed() ? p.batch : 0, batch = p.packed() ? 1 : p.batch;
  if (batch * p.heads_q * (ceil_div(p.len_q, 64) + sequences) >= INT32_MAX / 2) {
    return "it takes up to 2^30 tiles of query rows of all heads";
  }
  if (!has_map(p.q, p.batch, p.heads_q, p.len_q)) return kRefusedStrides;
  return nullptr;
}

// A block has all keys of its rows: few rows over many keys leave most of the device idle.
const char* few_rows_refusal(int64_t tiles, int64_t len_k, const DeviceLimits& device) {
  return 2 * tiles < device.multiprocessors && len_k > 1024
             ? "it does not split keys, which few rows over many of them want"
             : nullptr;
}

// A softcap alone leaves scores in units of the cap, ALiBi alone in those of the products: one
// multiplication a score less than natural ones.
void set_score_unit(AttnFwdKernelParams& p) {
  p.score = score_unit(p);
  p.slope_unit = 1.0f;
  if (!p.score.natural || (p.mask && !p.boolean_mask())) return;
  const float scale = static_cast<float>(p.scale);
  if (p.softcap > 0 && !p.alibi) {
    p.score = {p.score.unit * static_cast<float>(p.softcap), 1.0f, false};
  } else if (!(p.softcap > 0) && scale > 1e-12f && scale < 1e12f) {
    p.score = {p.score.unit * scale, 1.0f, false};
    p.slope_unit = 1.0f / scale;
  }
}

// All but what keys lie in.
AttnFwdKernelParams kernel_params(const AttentionParams& params, const AttnFwdConfig& c,
                                  const DeviceLimits& device) {
  AttnFwdKernelParams p;
  static_cast<AttentionParams&>(p) = params;
  if (!p.packed()) p.keys = RowKeys::of(p.band, sequence_of(p, 0));
  p.order = order_of(p, c, device);
  p.cached_keys = static_cast<int>(
      std::min<int64_t>(device.l2_bytes / kCacheParts /
                            std::max<int64_t>((p.dim + p.dim_v) * element_bytes(p.q.dtype), 1),
                        INT32_MAX));
  p.q_map = tile::make_tensor_map(p.q, p.dim, p.len_q, p.heads_q, p.batch, 64);
  p.q_steps = MapSteps::of(p.q), p.k_steps = MapSteps::of(p.k), p.v_steps = MapSteps::of(p.v);
  p.heads = Divisor(p.heads_q);
  p.group_heads = Divisor(p.group());
  set_score_unit(p);
  p.scale_fp32 = static_cast<float>(p.scale);
  p.cap = static_cast<float>(p.softcap);
  p.cap_unit = p.softcap > 0 ? static_cast<float>(p.scale / p.softcap) : 0.0f;
  return p;
}

void launch(size_t row, const AttnFwdKernelParams& p, const DeviceLimits& device,
            cudaStream_t stream) {
  const int64_t slots = int64_t{device.multiprocessors} * kAttnFwdKernels[row].config.blocks;
  const int blocks = static_cast<int>(std::min(p.order.count(), slots));
  dispatch_element(p.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if constexpr (sizeof(T) == 2) {
      const Extras unit = unit_of(kAttnFwdKernels[row].extras);
      (unit == Extras::kAll     ? launch_attn_fwd_typed<T, Extras::kAll>
       : unit == Extras::kMasks ? launch_attn_fwd_typed<T, Extras::kMasks>
       : unit == Extras::kPages ? launch_attn_fwd_typed<T, Extras::kPages>
                                : launch_attn_fwd_typed<T, Extras::kTerms>)(row, p, blocks, stream);
    }
  });
}

}  // namespace

const char* attn_fwd_refusal(const AttentionParams& p, const DeviceLimits& device) {
  if (const char* reason = refusal(p, extras_of(p), p.len_k, device)) return reason;
  if (p.alibi && std::abs(p.q_offset + p.diagonal - p.k_offset) >= RowKeys::kFar) {
    return "with ALiBi it takes offsets below 2^30 - 1024";
  }
  if (p.boolean_mask() && !boolean_mask_has_pairs(p)) {
    return "of boolean masks it takes those with unit columns, an even number of them, and rows "
           "that start at even addresses";
  }
  if (p.mask && !p.boolean_mask() &&
      (p.mask.dtype != p.q.dtype || (p.len_q > 1 && p.mask.row == 0) ||
       !rows_aligned(p.mask, p.batch, p.heads_q, p.len_q, 16))) {
    return "of additive masks it takes those of the query's type with unit columns, rows that "
           "start at multiples of 16 bytes, and are not one row for all";
  }
  if (!has_map(p.k, p.batch, p.heads_kv, p.len_k) || !has_map(p.v, p.batch, p.heads_kv, p.len_k)) {
    return kRefusedStrides;
  }
  const int64_t tiles = ceil_div(p.len_q, 128);
  if (!p.packed()) return few_rows_refusal(p.heads_q * p.batch * tiles, p.len_k, device);
  return few_rows_refusal(p.heads_q * std::max(tiles, p.batch),
                          p.len_k / std::max<int64_t>(p.batch, 1), device);
}

const char* attn_fwd_kernel(const AttentionParams& p) {
  return kAttnFwdKernels[row_with(p, extras_of(p))].name;
}

void launch_attn_fwd(const AttentionParams& params, const MaskTiles& mask_tiles,
                     const DeviceLimits& device, int32_t* counters, cudaStream_t stream) {
  if (params.batch == 0 || params.heads_q == 0 || params.len_q == 0) return;
  const size_t row = row_with(params, extras_of(params));
  const AttnFwdConfig& c = kAttnFwdKernels[row].config;
  AttnFwdKernelParams p = kernel_params(params, c, device);
  p.k_map = tile::make_tensor_map(p.k, p.dim, p.len_k, p.heads_kv, p.batch, c.block_k);
  p.v_map = tile::make_tensor_map(p.v, p.dim_v, p.len_k, p.heads_kv, p.batch, c.block_k);
  if (p.mask && !p.boolean_mask())
    p.bias_map = tile::make_tensor_map(p.mask, p.len_k, p.len_q, p.heads_q, p.batch, 64);
  p.bias_steps = MapSteps::of(p.mask);
  p.mask_tiles = mask_tiles;
  if (p.drops_all()) p.dropout_threshold = 0;  // only LSE is left to compute
  p.counters = counters;
  launch(row, p, device, stream);
}

const char* paged_prefill_refusal(const PagedParams& paged, const DeviceLimits& device) {
  if (paged.k.type != CacheType::kSame || paged.k.scale || paged.v.scale) {
    return "it takes caches of the query's type without scales";
  }
  if (paged.tree) return "it does not take tree_mask";
  if (paged.cu_seqlens_q.stride != (paged.cu_seqlens_q.int64 ? 8u : 4u)) {
    return "it takes contiguous cu_seqlens_q";
  }
  if (paged.dim == 0 || paged.dim_v == 0 || paged.k.pages == 0) {
    return "it takes pages, and heads that are not empty";
  }
  const AttentionParams p = attention_over_pages(paged);
  if (extras_of(p) == Extras::kTerms) {
    return "over pages it takes no softcap, no ALiBi and scales that are positive";
  }
  if (const char* reason = refusal(p, Extras::kPages, paged.table.most_keys, device)) return reason;
  const int64_t page_size = paged.table.page_size;
  if (!has_map(p.k, paged.k.pages, p.heads_kv, page_size) ||
      !has_map(p.v, paged.v.pages, p.heads_kv, page_size)) {
    return kRefusedStrides;
  }
  if (p.out && !rows_aligned(p.out, 1, p.heads_q, p.len_q, 16)) {
    return "it writes rows of out that start at multiples of 16 bytes";
  }
  KeyPages pages;
  if (!set_pages(paged, 0, pages)) {
    return "it takes caches of up to 64 GB";
  }
  return few_rows_refusal(p.heads_q * std::max(ceil_div(p.len_q, 128), p.batch),
                          paged.table.most_keys, device);
}

const char* paged_prefill_kernel(const PagedParams& paged) {
  return kAttnFwdKernels[row_with(attention_over_pages(paged), Extras::kPages)].name;
}

void launch_paged_prefill(const PagedParams& paged, int few_rows, const DeviceLimits& device,
                          int32_t* counters, cudaStream_t stream) {
  const AttentionParams params = attention_over_pages(paged);
  const size_t row = row_with(params, Extras::kPages);
  const AttnFwdConfig& c = kAttnFwdKernels[row].config;
  AttnFwdKernelParams p = kernel_params(params, c, device);
  const int64_t page_size = paged.table.page_size;
  set_pages(paged, few_rows, p.pages);
  const bool boxes = !paged.table.slots && page_size % 8 == 0 && p.k.batch != 0 && p.v.batch != 0;
  if (boxes) p.pages.box_keys = static_cast<int>(std::gcd(page_size, int64_t{c.block_k}));
  p.pages.warps = kMostCopyingWarps;
  if (boxes) p.pages.warps = std::min(c.block_k / p.pages.box_keys, kMostCopyingWarps);
  const int box_rows = boxes ? p.pages.box_keys : 1;
  p.k_map = tile::make_tensor_map(p.k, p.dim, page_size, p.heads_kv, paged.k.pages, box_rows);
  p.v_map = tile::make_tensor_map(p.v, p.dim_v, page_size, p.heads_kv, paged.v.pages, box_rows);
  p.counters = counters;
  launch(row, p, device, stream);
}

}  // namespace flashbpt::sm90
