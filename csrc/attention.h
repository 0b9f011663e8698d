// The host side of the attention ops: check -> params -> choose -> launch. Schemas: ops.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/util/string_view.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

namespace flashbpt {

// What every attention op takes after its tensors, in the order of the schemas.
struct AttentionOptions {
  std::optional<at::Tensor> mask, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, rng_state;
  std::optional<int64_t> max_seqlen_q, max_seqlen_k;
  std::optional<double> scale;
  bool causal;
  int64_t window_left, window_right;
  double softcap, dropout_p;
  int64_t q_offset, k_offset, batch_offset, head_offset, total_heads, diagonal;
  int64_t backend;
};

struct AttentionSaved {
  at::Tensor out, lse;
  std::optional<at::Tensor> lse_lo, mask_tiles;
};

using Gradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options);

// need: dq, dk, dv, dmask, dsinks, dalibi; what is not needed comes back undefined.
Gradients attention_backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse,
                             const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionSaved& saved, const AttentionOptions& options,
                             bool deterministic, const std::array<bool, 6>& need);

// The same for one block of query rows: its part of dk and dv is added into the given tensors.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward_accumulate(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const AttentionSaved& saved,
    const AttentionOptions& options, bool deterministic, const std::array<bool, 6>& need,
    at::Tensor dk, at::Tensor dv);

// Line 1: the kernel that would serve the call, or "none"; then "backend: why it does not" a line.
std::string attention_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionOptions& options, bool backward);

// sizes: batch, heads, len_q, len_k; offsets: batch, head, q, k, total_heads (0: heads).
at::Tensor dropout_mask(const at::Tensor& rng_state, double p, at::IntArrayRef sizes,
                        at::IntArrayRef offsets);

// int64 [2]: the seed and offset that a call with dropout uses. The only op that moves the
// generator: `increment` counts 32-bit draws of a thread, as in CUDA's Philox generator.
at::Tensor draw_rng_state(const at::Tensor& like, int64_t increment);

// A copy of cu_seqlens; refuses offsets that do not start at 0, decrease or run past the tokens.
// Reads device memory.
at::Tensor check_cu_seqlens(const at::Tensor& cu_seqlens, int64_t tokens, c10::string_view name);

}  // namespace flashbpt
