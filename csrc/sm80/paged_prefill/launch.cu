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
  return p.cu_seqlens_q && p.cu_seqlens_q.stride == 1 && p.k.type == CacheType::kSame &&
         !p.k.scale && !p.v.scale && !p.tree &&
         choose_row(p, device) < std::size(kPagedPrefillKernels);
}

const char* paged_prefill_kernel(const PagedParams& p, const DeviceLimits& device) {
  return kPagedPrefillKernels[choose_row(p, device)].name;
}

void launch_paged_prefill(const PagedParams& paged, const DeviceLimits& device,
                          cudaStream_t stream) {
  const size_t row = choose_row(paged, device);
  const AttnFwdConfig& c = kPagedPrefillKernels[row].config;
  PagedPrefillKernelParams p;
  p.q = paged.q, p.out = paged.out, p.lse = paged.lse;
  p.sinks = paged.sinks, p.alibi = paged.alibi;
  const auto keys = [&](const CacheView& cache) {
    return TensorView{cache.data, paged.q.dtype, 0, cache.head, cache.token, 1};
  };
  p.k = keys(paged.k), p.v = keys(paged.v);
  p.batch = paged.batch, p.heads_q = paged.heads_q, p.heads_kv = paged.heads_kv;
  p.len_q = paged.tokens;
  p.dim = paged.dim, p.dim_v = paged.dim_v;
  p.cu_seqlens_q = p.cu_seqlens_k = paged.cu_seqlens_q.data;
  p.cu_seqlens_int64 = paged.cu_seqlens_q.int64;
  p.scale = paged.scale, p.softcap = paged.softcap, p.band = paged.band;
  p.total_heads = p.heads_q;
  const auto divisor = [](int64_t n) { return Divisor(static_cast<uint32_t>(n)); };
  p.pages = {paged.table, divisor(paged.table.page_size), paged.k.page, paged.v.page,
             paged_decode_rows(paged)};
  // The pages of a cache as batch elements: their rows are the heads' tokens.
  const auto access = [&](const CacheView& cache) {
    TensorView t = keys(cache);
    t.batch = cache.page;
    return row_access(t, 2, p.heads_kv, 2);
  };
  p.access = {row_access(p.q, 1, p.heads_q, p.len_q), access(paged.k), access(paged.v),
              row_access(p.out, 1, p.heads_q, p.len_q), 0};
  p.slices_qk = 1;
  p.heads = divisor(p.heads_q);
  p.group_heads = divisor(p.group());
  p.key_parts = divisor(1);
  p.slices_v = divisor(1);
  p.score = score_unit(p);
  const int64_t tiles = ceil_div(p.len_q, c.block_q) + p.batch;
  p.order = TileOrder::make(tiles, p.heads_q, p.group(), 0, device.l2_bytes,
                            p.band.right != Band::kNoLimit);
  (paged.q.dtype == DataType::kBFloat16 ? launch_paged_prefill_bf16 : launch_paged_prefill_fp16)(
      row, static_cast<unsigned>(tiles * p.heads_q), p, stream);
}

}  // namespace flashbpt::sm80
