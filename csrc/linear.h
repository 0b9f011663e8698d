// The matrix products of a block of rows: torch.nn.Linear's layout, y = x W^T + b with W [out, in].
#pragma once

#include <ATen/core/Tensor.h>

namespace flashbpt {

// out = x W^T + bias; bias undefined for none.
void linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::Tensor out);

// dx = dy W, or dx += dy W.
void linear_input_gradient(const at::Tensor& dy, const at::Tensor& weight, at::Tensor dx, bool add);

// dweight += dy^T x and dbias += sum of dy's rows, in the accumulation type whatever the rows are;
// each may be undefined.
void linear_weight_gradients(const at::Tensor& dy, const at::Tensor& x, at::Tensor dweight,
                             at::Tensor dbias);

}  // namespace flashbpt
