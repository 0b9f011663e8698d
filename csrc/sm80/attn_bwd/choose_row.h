// Which row of a table of the backward's tiles serves a call.
#pragma once

#include <algorithm>

#include "../attn_params.h"
#include "config.h"

namespace flashbpt::sm80 {

// The first row that serves the call in one slice where there is one, else the widest.
template <typename Kernel, size_t kRows>
size_t choose_row(const Kernel (&kernels)[kRows], const AttentionParams& p,
                  const DeviceLimits& device) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  size_t best = 0;
  int best_dim = 0;
  for (size_t row = 0; row < kRows; ++row) {
    const Kernel& k = kernels[row];
    const bool sliced = dim > k.config.head_dim;
    if (k.dtype != p.q.dtype || !serves(k.terms, sliced ? Terms::kAll : terms_of(p))) continue;
    if (k.config.smem_bytes(mask_element_bytes(p)) > device.smem_bytes) continue;
    if (!sliced) return row;
    if (k.config.head_dim > best_dim) best = row, best_dim = k.config.head_dim;
  }
  return best;
}

inline int64_t key_tiles(const AttentionParams& p, const AttnBwdConfig& c) {
  return ceil_div(p.len_k, c.block_k) + (p.packed() ? p.batch : 0);
}

}  // namespace flashbpt::sm80
