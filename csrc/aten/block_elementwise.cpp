// block_elementwise.h by ATen's operations, in the accumulation type: the CPU, and fp64 on CUDA.
#include "../block_elementwise_backends.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>

#include <algorithm>

#include "../attention/philox.h"
#include "../check.h"

namespace flashbpt {
namespace aten {
namespace {

at::Tensor accumulator(const at::Tensor& t) {
  return t.to(accumulation_dtype(t.scalar_type()));
}

at::Tensor row_mean(const at::Tensor& t) {
  return t.mean(at::IntArrayRef{-1}, /*keepdim=*/true);
}

// (x - mean) / sqrt(variance + eps), and that factor, in x's type.
struct Normalized {
  at::Tensor x, rstd;
  Normalized(const at::Tensor& rows, const Norm& norm) {
    const at::Tensor centred = norm.kind == NormKind::kLayer ? rows - row_mean(rows) : rows;
    rstd = (row_mean(centred * centred) + norm.eps).rsqrt();
    x = centred * rstd;
  }
};

at::Tensor scaled(const at::Tensor& x, const Norm& norm) {
  at::Tensor y = norm.weight.defined() ? x * norm.weight.to(x.scalar_type()) : x;
  return norm.bias.defined() ? y + norm.bias.to(x.scalar_type()) : y;
}

// Sum over all dimensions but the last.
void add_rows(const at::Tensor& total, const at::Tensor& rows) {
  if (total.defined()) total.add_(rows.reshape({-1, rows.size(-1)}).sum(0));
}

// The gradient of norm(x) at x, in the accumulation type; adds up those of its weights.
at::Tensor norm_gradient(const at::Tensor& dy, const at::Tensor& x, const Norm& norm,
                         const NormGradients& grads) {
  const Normalized n(x, norm);
  add_rows(grads.weight, dy * n.x);
  add_rows(grads.bias, dy);
  const at::Tensor g = norm.weight.defined() ? dy * norm.weight.to(dy.scalar_type()) : dy;
  at::Tensor dx = g - n.x * row_mean(g * n.x);
  if (norm.kind == NormKind::kLayer) dx = dx - row_mean(g);
  return dx * n.rstd;
}

// Turns heads [rows, heads, dim] by the angles, or back by them.
at::Tensor turned(const at::Tensor& x, const Rope& rope, bool back) {
  if (!rope.cos.defined()) return x;
  const int64_t pairs = rope.cos.size(-1);
  at::Tensor out = x.clone();
  const auto part = [&](const at::Tensor& t, int64_t which) {
    return rope.interleaved ? t.slice(-1, which, 2 * pairs, 2)
                            : t.slice(-1, which * pairs, (which + 1) * pairs);
  };
  const at::Tensor cos = rope.cos.unsqueeze(1).to(x.scalar_type());
  const at::Tensor sin = (back ? rope.sin.neg() : rope.sin).unsqueeze(1).to(x.scalar_type());
  const at::Tensor a = part(x, 0), b = part(x, 1);
  part(out, 0).copy_(a * cos - b * sin);
  part(out, 1).copy_(b * cos + a * sin);
  return out;
}

at::Tensor activated(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return at::silu(x);
    case Activation::kGelu:
      return at::gelu(x);
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kRelu:
      break;
  }
  return at::relu(x);
}

at::Tensor activation_gradient(const at::Tensor& dy, const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return at::silu_backward(dy, x);
    case Activation::kGelu:
      return at::gelu_backward(dy, x);
    case Activation::kGeluTanh:
      return at::gelu_backward(dy, x, "tanh");
    case Activation::kRelu:
      break;
  }
  return at::threshold_backward(dy, x, 0);
}

// 1 / (1 - p) where dropout keeps a column, 0 elsewhere; [rows, width] like x.
at::Tensor kept(const at::Tensor& x, const RowDropout& dropout) {
  const int64_t rows = x.size(0), width = x.size(1);
  const auto longs = x.options().dtype(at::kLong);
  const at::Tensor state = at::from_blob(const_cast<int64_t*>(dropout.rng_state), {2}, longs).cpu();
  const int64_t* const words = state.const_data_ptr<int64_t>();
  const PhiloxKeys keys(static_cast<uint64_t>(words[0]));
  const uint32_t offset = static_cast<uint32_t>(words[1] + 4 * dropout.site);
  at::Tensor factors = at::empty({rows, width}, at::kDouble);
  double* const data = factors.mutable_data_ptr<double>();
  at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t c = 0; c < width; c += 4) {
        const PhiloxWords drawn = philox4x32_7(
            keys,
            {{offset, 0, static_cast<uint32_t>(dropout.token + r), static_cast<uint32_t>(c / 4)}});
        for (int64_t i = c; i < std::min(c + 4, width); ++i)
          data[r * width + i] = drawn.word[i - c] >= dropout.threshold ? dropout.scale : 0.0;
      }
  });
  return factors.to(x.device(), accumulation_dtype(x.scalar_type()));
}

void norm_forward(const at::Tensor& x, const Norm& norm, const at::Tensor& out) {
  out.copy_(scaled(Normalized(accumulator(x), norm).x, norm));
}

void norm_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm,
                   const at::Tensor& residual, const at::Tensor& dx, const NormGradients& grads) {
  const at::Tensor gradient = norm_gradient(accumulator(dy), accumulator(x), norm, grads);
  dx.copy_(residual.defined() ? residual + gradient : gradient);
}

void rope_forward(const at::Tensor& x, const Norm& norm, const Rope& rope, const at::Tensor& out) {
  at::Tensor heads = accumulator(x);
  if (norm.weight.defined()) heads = scaled(Normalized(heads, norm).x, norm);
  out.copy_(turned(heads, rope, false));
}

void rope_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm, const Rope& rope,
                   const at::Tensor& dx, const NormGradients& grads) {
  at::Tensor gradient = turned(accumulator(dy), rope, true);
  if (norm.weight.defined()) gradient = norm_gradient(gradient, accumulator(x), norm, grads);
  dx.copy_(gradient);
}

void activation_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation,
                        const at::Tensor& out) {
  const at::Tensor u = accumulator(up);
  out.copy_(gate.defined() ? activated(accumulator(gate), activation) * u
                           : activated(u, activation));
}

void activation_backward(const at::Tensor& da, const at::Tensor& gate, const at::Tensor& up,
                         Activation activation) {
  // dy and da, u and up may be one tensor: all is computed before anything is written.
  const at::Tensor u = accumulator(up), dy = accumulator(da);
  at::Tensor out, dup;
  if (gate.defined()) {
    const at::Tensor g = accumulator(gate), a = activated(g, activation);
    out = a * u;
    dup = dy * a;
    gate.copy_(activation_gradient(dy * u, g, activation));
  } else {
    out = activated(u, activation);
    dup = activation_gradient(dy, u, activation);
  }
  da.copy_(out);
  up.copy_(dup);
}

void residual_forward(const at::Tensor& x, const at::Tensor& bias, const RowDropout& dropout,
                      const at::Tensor& residual, const at::Tensor& out) {
  at::Tensor y = accumulator(x);
  if (bias.defined()) y = y + bias;
  if (dropout.rng_state) y = y * kept(x, dropout);
  out.copy_(residual + y);
}

void dropout_backward(const at::Tensor& dy, const RowDropout& dropout, const at::Tensor& dx) {
  dx.copy_(dropout.rng_state ? accumulator(dy) * kept(dy, dropout) : dy);
}

}  // namespace
}  // namespace aten

const RowBackend kAtenRows{aten::norm_forward,       aten::norm_backward,
                           aten::rope_forward,       aten::rope_backward,
                           aten::activation_forward, aten::activation_backward,
                           aten::residual_forward,   aten::dropout_backward};

}  // namespace flashbpt
