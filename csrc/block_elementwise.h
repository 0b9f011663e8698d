// What the blockwise transformer does between its matrix products, a block of rows at a time: one
// call each, on the CPU and on CUDA. Rows are contiguous, [rows, width]; element types those of
// attention. Sums are kept in the accumulation type (fp64 for fp64, else fp32). The residual stream
// may be in fp32 over products in 16 bits: what norms read, and what is added to.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "activation.h"

namespace flashbpt {

enum class NormKind : int64_t { kRms, kLayer };

// A norm over the last dimension: (x - mean) * rstd * weight + bias, with mean 0 and no bias in an
// RMSNorm.
struct Norm {
  NormKind kind;
  double eps;
  at::Tensor weight;  // [width]; undefined: ones
  at::Tensor bias;    // [width]; undefined: zeros
};

// Gradients of a norm's weights, [width] in the accumulation type, added into; undefined where not
// needed.
struct NormGradients {
  at::Tensor weight, bias;
};

// out = norm(x), all [rows, width].
void norm_forward(const at::Tensor& x, const Norm& norm, const at::Tensor& out);

// dx = residual + the gradient of norm(x) at x along dy; residual may be undefined or dx itself.
void norm_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm,
                   const at::Tensor& residual, const at::Tensor& dx, const NormGradients& grads);

// Rotary embedding of a block's rows: of each row of cos and sin, [rows, pairs] fp32 (fp64 for fp64
// rows), pair j turns columns (j, j + pairs), or (2 j, 2 j + 1) where interleaved. Columns from
// 2 * pairs on stay. Undefined cos: nothing turns.
struct Rope {
  at::Tensor cos, sin;
  bool interleaved;
};

// out = rope(norm(x)) of heads [rows, heads, dim]; norm.weight is [dim], undefined where heads have
// no norm (an RMSNorm always). out may be x.
void rope_forward(const at::Tensor& x, const Norm& norm, const Rope& rope, const at::Tensor& out);

// dx for dy; x is what rope_forward had, undefined where heads have no norm. dx may be dy. dy may
// be in the accumulation type, and then its rows and heads may have any strides.
void rope_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm, const Rope& rope,
                   const at::Tensor& dx, const NormGradients& grads);

// out = activation(gate) * up, or activation(up) where gate is undefined. out may be gate or up.
void activation_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation,
                        const at::Tensor& out);

// gate and up hold what the forward had and become their gradients; da, the gradient of the
// forward's output, becomes that output, computed again.
void activation_backward(const at::Tensor& da, const at::Tensor& gate, const at::Tensor& up,
                         Activation activation);

// The words of dropout that belong to `rows` tokens from `token` on: Philox counter
// (offset + 4 * site, 0, token, column / 4), word column % 4; kept where word >= threshold.
struct RowDropout {
  const int64_t* rng_state = nullptr;  // [2] on the rows' device: seed, offset; null: none
  int64_t site = 0;
  int64_t token = 0;
  uint64_t threshold = 0;
  double scale = 1.0;  // of what is kept, 1 / (1 - p)
};

// out = residual + dropout(x + bias); bias [width], undefined for none. out may be x or residual.
void residual_forward(const at::Tensor& x, const at::Tensor& bias, const RowDropout& dropout,
                      const at::Tensor& residual, const at::Tensor& out);

// dx = dropout(dy) with the same words; dx may be dy.
void dropout_backward(const at::Tensor& dy, const RowDropout& dropout, const at::Tensor& dx);

}  // namespace flashbpt
