// Chooses the kernel of a call and what its blocks do.
#include "launch.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "../../dispatch_element.h"
#include "../../row_access.h"
#include "../../tile/tensor_map.h"
#include "config.h"
#include "schedule.h"

namespace flashbpt::sm90 {

template <typename T>
void launch_attn_fwd_typed(size_t row, const AttnFwdKernelParams& p, int blocks,
                           cudaStream_t stream);

namespace {

constexpr int64_t kLargestDim = 256;

// The narrowest tile that holds the head.
size_t choose_row(const AttentionParams& p) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  const ScoreUnit score = score_unit(p);
  const bool terms = score.natural || score.sign != 1.0f;
  const auto serves = [&](const AttnFwdKernel& k) {
    return k.dtype == p.q.dtype && k.terms == terms && k.config.head_dim >= dim;
  };
  return std::find_if(std::begin(kAttnFwdKernels), std::end(kAttnFwdKernels), serves) -
         kAttnFwdKernels;
}

// Strides of dimensions of size 1 do not matter; a broadcast dimension has no stride to step by.
bool has_map(const TensorView& t, int64_t batch, int64_t heads, int64_t rows) {
  const auto steps = [](int64_t size, int64_t stride) { return size <= 1 || stride > 0; };
  return t.col == 1 && row_access(t, batch, heads, rows) >= 16 && steps(batch, t.batch) &&
         steps(heads, t.head) && steps(rows, t.row);
}

}  // namespace

const char* attn_fwd_refusal(const AttentionParams& p, const DeviceLimits& device) {
  if (p.dim % 8 != 0 || p.dim_v % 8 != 0 || std::max(p.dim, p.dim_v) > kLargestDim) {
    return "it takes head dims that are multiples of 8 up to 256";
  }
  if (kAttnFwdKernels[choose_row(p)].config.smem_bytes() > device.smem_bytes) {
    return "its tiles want more shared memory than the GPU has";
  }
  if (std::max(p.len_q, p.len_k) >= RowKeys::kFar) return "it takes lengths below 2^30";
  if (p.alibi && std::abs(p.q_offset + p.diagonal - p.k_offset) >= RowKeys::kFar) {
    return "with ALiBi it takes offsets below 2^30";
  }
  if (p.batch * p.heads_q * ceil_div(p.len_q, 64) >= INT32_MAX / 2) {
    return "it takes up to 2^30 tiles of query rows of all heads";
  }
  if (p.packed()) return "it does not take packed sequences";
  if (p.mask) return "it does not take masks";
  if (p.dropout_threshold > 0 && !p.drops_all()) return "it does not take dropout";
  if (!has_map(p.q, p.batch, p.heads_q, p.len_q) || !has_map(p.k, p.batch, p.heads_kv, p.len_k) ||
      !has_map(p.v, p.batch, p.heads_kv, p.len_k)) {
    return "its copies want unit columns, addresses and strides that are multiples of 16 bytes, no "
           "broadcast dimension";
  }
  // A block has all keys of its rows: few rows over many keys leave most of the device idle.
  const int64_t tiles = p.batch * p.heads_q * ceil_div(p.len_q, 128);
  if (2 * tiles < device.multiprocessors && p.len_k > 1024) {
    return "it does not split keys, which few rows over many of them want";
  }
  return nullptr;
}

const char* attn_fwd_kernel(const AttentionParams& p) {
  return kAttnFwdKernels[choose_row(p)].name;
}

void launch_attn_fwd(const AttentionParams& params, const DeviceLimits& device, int32_t* counters,
                     cudaStream_t stream) {
  const size_t row = choose_row(params);
  const AttnFwdConfig& c = kAttnFwdKernels[row].config;
  AttnFwdKernelParams p;
  static_cast<AttentionParams&>(p) = params;
  const int64_t heads = p.batch * p.heads_q;
  // Where all tiles are equally long, those of one head (of one group) run together, so that few
  // keys are in use at once; else the longest of as many heads as fit the cache.
  const bool causal = p.band.right != Band::kNoLimit;
  const int64_t kv_bytes = p.len_k * (p.dim + p.dim_v) * element_bytes(p.q.dtype);
  p.order = TileOrder::make(ceil_div(p.len_q, c.block_q()), heads, p.group(),
                            causal ? kv_bytes : device.l2_bytes, device.l2_bytes, causal,
                            causal ? 4 * device.multiprocessors : 0);
  const int64_t works = int64_t{p.order.tiles} * p.order.heads;
  if (works == 0) return;
  p.q_map = tile::make_tensor_map(p.q, p.dim, p.len_q, p.heads_q, p.batch, c.block_q());
  p.k_map = tile::make_tensor_map(p.k, p.dim, p.len_k, p.heads_kv, p.batch, c.block_k);
  p.v_map = tile::make_tensor_map(p.v, p.dim_v, p.len_k, p.heads_kv, p.batch, c.block_k);
  p.heads = Divisor(p.heads_q);
  p.group_heads = Divisor(p.group());
  p.keys = RowKeys::of(p);
  p.diagonal_near = static_cast<int>(sequence_of(p, 0).shift);
  p.score = score_unit(p);
  p.scale_fp32 = static_cast<float>(p.scale);
  p.cap = static_cast<float>(p.softcap);
  p.cap_unit = p.softcap > 0 ? static_cast<float>(p.scale / p.softcap) : 0.0f;
  p.counters = counters;
  const int blocks = static_cast<int>(std::min<int64_t>(works, device.multiprocessors));
  dispatch_element(p.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if constexpr (sizeof(T) == 2) launch_attn_fwd_typed<T>(row, p, blocks, stream);
  });
}

}  // namespace flashbpt::sm90
