#include "launch.h"

#include <algorithm>
#include <iterator>

#include "../paged_decode/launch.h"
#include "config.h"
#include "launch_kernels.h"

namespace flashbpt::sm80 {
namespace {

// The narrowest tile that holds a head, without the terms that a call lacks where that fits the
// device.
size_t choose_row(const PagedParams& p, const DeviceLimits& device) {
  const bool terms = p.softcap > 0 || p.alibi;
  const int64_t dim = std::max(p.dim, p.dim_v);
  size_t best = std::size(kPagedPrefillKernels);
  for (size_t i = 0; i < std::size(kPagedPrefillKernels); ++i) {
    const PagedPrefillKernel& k = kPagedPrefillKernels[i];
    if (k.dtype != p.q.dtype || k.config.head_dim < dim || k.smem_bytes() > device.smem_bytes ||
        (terms && k.terms != Terms::kAll))
      continue;
    if (best == std::size(kPagedPrefillKernels) ||
        k.config.head_dim < kPagedPrefillKernels[best].config.head_dim)
      best = i;
  }
  return best;
}

}  // namespace

bool paged_prefill_serves(const PagedParams& p, const DeviceLimits& device) {
  return p.cu_seqlens_q && p.cu_seqlens_q.stride == (p.cu_seqlens_q.int64 ? 8 : 4) &&
         p.k.type == CacheType::kSame && !p.k.scale && !p.v.scale && !p.tree &&
         choose_row(p, device) < std::size(kPagedPrefillKernels);
}

const char* paged_prefill_kernel(const PagedParams& p, const DeviceLimits& device) {
  return kPagedPrefillKernels[choose_row(p, device)].name;
}

int paged_prefill_splits(const PagedParams& p, const DeviceLimits& device) {
  const AttnFwdConfig& c = kPagedPrefillKernels[choose_row(p, device)].config;
  const int64_t blocks = (ceil_div(p.tokens, c.block_q) + p.batch - 1) * p.heads_q;
  const int64_t slots = int64_t{device.multiprocessors} * c.min_blocks;
  if (blocks <= 0 || blocks * 2 > slots) return 1;
  // Four tiles a part at least: a part costs a merge.
  const int64_t most = ceil_div(p.table.most_keys, c.block_k) / 4;
  return static_cast<int>(std::clamp<int64_t>(std::min(slots / blocks, most), 1, 32));
}

void launch_paged_prefill(const PagedParams& paged, const KeySplits& splits,
                          const DeviceLimits& device, cudaStream_t stream) {
  const size_t row = choose_row(paged, device);
  const AttnFwdConfig& c = kPagedPrefillKernels[row].config;
  PagedPrefillKernelParams p;
  const AttentionParams keys = attention_over_pages(paged);
  static_cast<AttentionParams&>(p) = keys;
  p.k.batch = p.v.batch = 0;  // pages have strides of their own
  const bool counted = set_pages(paged, paged_decode_rows(paged), p.pages);
  p.pages.k_page = paged.k.page * 2, p.pages.v_page = paged.v.page * 2;
  p.splits = splits;
  const TensorView& out = splits.count > 1 ? splits.out : p.out;
  p.access = {row_access(p.q, 1, p.heads_q, p.len_q), row_access(keys.k, 2, p.heads_kv, 2),
              row_access(keys.v, 2, p.heads_kv, 2), row_access(out, 1, p.heads_q, p.len_q), 0};
  p.pages.whole_chunks =
      counted && p.access.k == 16 && p.access.v == 16 && p.dim % 8 == 0 && p.dim_v % 8 == 0;
  p.slices_qk = 1;
  p.heads = Divisor(p.heads_q);
  p.group_heads = Divisor(p.group());
  p.key_parts = Divisor(splits.count);
  p.slices_v = Divisor(1);
  p.score = score_unit(p);
  const int64_t tiles = ceil_div(p.len_q, c.block_q) + p.batch;
  p.order = TileOrder::make(tiles, p.heads_q, p.group(), 0, device.l2_bytes / 2,
                            p.band.right != Band::kNoLimit, 0);
  (paged.q.dtype == DataType::kBFloat16 ? launch_paged_prefill_bf16 : launch_paged_prefill_fp16)(
      row, static_cast<unsigned>(tiles * p.heads_q * splits.count), p, stream);
}

}  // namespace flashbpt::sm80
