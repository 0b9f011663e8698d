// One attention call: its arguments checked once, as params for the kernels.
#pragma once

#include <vector>

#include "attention.h"
#include "check.h"
#include "params.h"

namespace flashbpt {

// Strides 0 where a dimension has size 1. t: [batch, heads, rows, cols]
TensorView broadcast_view(const at::Tensor& t);

// Threshold and scale of dropout; p outside [0, 1] is refused.
void set_dropout(AttentionParams& params, double p);

// The state that dropout draws from, where there is dropout.
void set_rng_state(AttentionParams& params, const std::optional<at::Tensor>& rng_state,
                   const at::Tensor& query);

class AttentionCall {
 public:
  // Checks everything that does not need device memory; throws in a sentence.
  AttentionCall(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const AttentionOptions& options);

  // What a kernel needs beyond the checks: dropout's state, sequences that blocks cut at words.
  void prepare_launch();
  bool packed() const { return params.packed(); }
  // No score, or nothing to sum: not worth a kernel. (Packed sequences may be empty one by one.)
  bool has_empty_dimension() const;
  // Also where the tensor has no elements, and so no data that params could show.
  bool has_additive_mask() const;
  bool has_boolean_mask() const;
  bool has_sinks() const;
  bool has_alibi() const;

  // q, k, v, out and their gradients: [B, H, L, D] or packed [T, H, D].
  TensorView view(const at::Tensor& t) const;
  // [B, H, L] or packed [T, H].
  TensorView lse_view(const at::Tensor& t) const;

  void check_saved(const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse,
                   const AttentionSaved& saved) const;
  void check_accumulator(const char* name, const at::Tensor& t, const at::Tensor& like) const;

  AttentionParams params;
  AttentionOptions options;
  at::Tensor q, k, v;
  at::Tensor sinks, slopes;  // in the accumulation type, contiguous; undefined where not given
  at::ScalarType acc;        // the accumulation type

 private:
  void check_tensors() const;
  void set_mask();
  void set_sinks_and_slopes();
  void set_sequences();
  void check_packed_block() const;
};

}  // namespace flashbpt
