// Chooses who computes: kernels of sm80 on a GPU, ATen on the CPU and in fp64. Both take rows of
// one type: where the residual stream is wider than what the products make, that is widened before.
#include "block_elementwise_backends.h"

#include <ATen/ops/empty_like.h>

namespace flashbpt {
namespace {

const RowBackend& backend_of(const at::Tensor& rows) {
  return rows.is_cuda() && rows.scalar_type() != at::kDouble ? kSm80Rows : kAtenRows;
}

}  // namespace

void norm_forward(const at::Tensor& x, const Norm& norm, const at::Tensor& out) {
  if (x.numel() == 0) return;
  if (out.scalar_type() != x.scalar_type()) {
    const at::Tensor wide = at::empty_like(x);
    norm_forward(x, norm, wide);
    out.copy_(wide);
    return;
  }
  backend_of(x).norm_forward(x, norm, out);
}

void norm_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm,
                   const at::Tensor& residual, const at::Tensor& dx, const NormGradients& grads) {
  if (x.numel() == 0) return;
  backend_of(x).norm_backward(dy.to(x.scalar_type()), x, norm, residual, dx, grads);
}

void rope_forward(const at::Tensor& x, const Norm& norm, const Rope& rope, const at::Tensor& out) {
  if (x.numel() == 0) return;
  backend_of(x).rope_forward(x, norm, rope, out);
}

void rope_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm, const Rope& rope,
                   const at::Tensor& dx, const NormGradients& grads) {
  if (dx.numel() == 0) return;
  backend_of(dx).rope_backward(dy, x, norm, rope, dx, grads);
}

void activation_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation,
                        const at::Tensor& out) {
  if (up.numel() == 0) return;
  backend_of(up).activation_forward(gate, up, activation, out);
}

void activation_backward(const at::Tensor& da, const at::Tensor& gate, const at::Tensor& up,
                         Activation activation) {
  if (up.numel() == 0) return;
  backend_of(up).activation_backward(da, gate, up, activation);
}

void residual_forward(const at::Tensor& x, const at::Tensor& bias, const RowDropout& dropout,
                      const at::Tensor& residual, const at::Tensor& out) {
  if (x.numel() == 0) return;
  const at::ScalarType dtype = out.scalar_type();
  backend_of(out).residual_forward(x.to(dtype), bias.defined() ? bias.to(dtype) : bias, dropout,
                                   residual, out);
}

void dropout_backward(const at::Tensor& dy, const RowDropout& dropout, const at::Tensor& dx) {
  if (dy.numel() == 0) return;
  backend_of(dy).dropout_backward(dy, dropout, dx);
}

}  // namespace flashbpt
