// Who computes what block_elementwise.h declares: the same functions, once by ATen's operations
// (the CPU, and fp64 on CUDA) and once by kernels of sm80.
#pragma once

#include "block_elementwise.h"

namespace flashbpt {

namespace aten {
void norm_forward(const at::Tensor& x, const Norm& norm, const at::Tensor& out);
void norm_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm,
                   const at::Tensor& residual, const at::Tensor& dx, const NormGradients& grads);
void rope_forward(const at::Tensor& x, const Norm& norm, const Rope& rope, const at::Tensor& out);
void rope_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm, const Rope& rope,
                   const at::Tensor& dx, const NormGradients& grads);
void activation_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation,
                        const at::Tensor& out);
void activation_backward(const at::Tensor& da, const at::Tensor& gate, const at::Tensor& up,
                         Activation activation);
void residual_forward(const at::Tensor& x, const at::Tensor& bias, const RowDropout& dropout,
                      const at::Tensor& residual, const at::Tensor& out);
void dropout_backward(const at::Tensor& dy, const RowDropout& dropout, const at::Tensor& dx);
}  // namespace aten

namespace sm80 {
void norm_forward(const at::Tensor& x, const Norm& norm, const at::Tensor& out);
void norm_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm,
                   const at::Tensor& residual, const at::Tensor& dx, const NormGradients& grads);
void rope_forward(const at::Tensor& x, const Norm& norm, const Rope& rope, const at::Tensor& out);
void rope_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm, const Rope& rope,
                   const at::Tensor& dx, const NormGradients& grads);
void activation_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation,
                        const at::Tensor& out);
void activation_backward(const at::Tensor& da, const at::Tensor& gate, const at::Tensor& up,
                         Activation activation);
void residual_forward(const at::Tensor& x, const at::Tensor& bias, const RowDropout& dropout,
                      const at::Tensor& residual, const at::Tensor& out);
void dropout_backward(const at::Tensor& dy, const RowDropout& dropout, const at::Tensor& dx);
}  // namespace sm80

}  // namespace flashbpt
