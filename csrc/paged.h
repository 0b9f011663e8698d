// The host side of the ops over paged caches: check -> params -> choose -> launch. Schemas:
// ops.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "paged_params.h"

namespace flashbpt {

// Where the keys of the requests lie, as tensors; attention/page_table.h says what each form holds.
struct PageTable {
  at::Tensor entries;
  std::optional<at::Tensor> rows, indptr, last_page_len;
  bool slots;
};

// What paged_attention takes after its tensors, in the order of the schema.
struct PagedOptions {
  std::optional<at::Tensor> seq_lens, cu_seqlens_q, tree_mask, alibi_slopes, sinks, key_scale,
      value_scale;
  std::optional<int64_t> max_seqlen_q;
  std::optional<double> scale;
  bool causal;
  int64_t window_left, window_right;
  double softcap;
  int64_t backend;
};

// q: [tokens, Hq, D]; caches: [pages, page_size, Hkv, D] and [.., Dv]. Returns (out, lse).
std::tuple<at::Tensor, at::Tensor> paged_attention(const at::Tensor& q, const at::Tensor& k_cache,
                                                   const at::Tensor& v_cache,
                                                   const PageTable& table,
                                                   const PagedOptions& options);

// The same into a given `out`; returns lse.
at::Tensor paged_attention_out(const at::Tensor& q, const at::Tensor& k_cache,
                               const at::Tensor& v_cache, const PageTable& table,
                               const PagedOptions& options, const at::Tensor& out);

// The backend that serves a call, with its kernel, and why the others do not: a line each.
std::string paged_attention_kernel(const at::Tensor& q, const at::Tensor& k_cache,
                                   const at::Tensor& v_cache, const PageTable& table,
                                   const PagedOptions& options);

// Throws where the contents of the page table, lengths or cu_seqlens_q are not allowed, whatever
// the device: they are copied to the host.
void check_paged_attention(const at::Tensor& q, const at::Tensor& k_cache,
                           const at::Tensor& v_cache, const PageTable& table,
                           const PagedOptions& options);

struct AppendOptions {
  std::optional<at::Tensor> cos, sin, positions;
  bool interleaved;
  std::optional<at::Tensor> key_scale, value_scale;
};

// Writes row i of key [tokens, Hkv, D] and value [tokens, Hkv, Dv] to slot slot_mapping[i]; a
// negative slot skips the row. cos, sin: keys are rotated on the way.
void append_paged_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache,
                     const at::Tensor& v_cache, const at::Tensor& slot_mapping,
                     const AppendOptions& options);

// Throws where a row would go past the cache's slots, whatever the device.
void check_slot_mapping(const at::Tensor& slot_mapping, int64_t slots);

}  // namespace flashbpt
