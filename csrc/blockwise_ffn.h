// The feed-forward half of a block, for one block of rows.
#pragma once

#include "blockwise.h"

namespace flashbpt {

// The pre-activations of some rows: made by the products, or slices of what was kept.
struct FfnHidden {
  at::Tensor gate, up;  // [rows, ffn]; no gate: not gated
};

FfnHidden ffn_hidden(const at::Tensor& x, const FfnWeights& w);

// out = activation(hidden) Wd^T + bias. Overwrites hidden.
void ffn_output(const FfnHidden& hidden, const FfnWeights& w, Activation activation,
                const at::Tensor& bias, const at::Tensor& out);

// dx = the gradient at x for dy, that of the output; overwrites hidden. Adds up the gradients of
// the weights. dx undefined: not needed.
void ffn_gradients(const at::Tensor& dy, const at::Tensor& x, const FfnHidden& hidden,
                   const FfnWeights& w, Activation activation, const FfnWeights& grads,
                   const at::Tensor& dx);

}  // namespace flashbpt
