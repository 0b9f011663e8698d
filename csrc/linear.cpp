#include "linear.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "check.h"

namespace flashbpt {

void linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::Tensor out) {
  if (bias.defined())
    at::addmm_out(out, bias, x, weight.t());
  else
    at::mm_out(out, x, weight.t());
}

void linear_input_gradient(const at::Tensor& dy, const at::Tensor& weight, at::Tensor dx,
                           bool add) {
  if (add)
    dx.addmm_(dy, weight);
  else
    at::mm_out(dx, dy, weight);
}

void linear_weight_gradients(const at::Tensor& dy, const at::Tensor& x, at::Tensor dweight,
                             at::Tensor dbias) {
  if (dbias.defined()) dbias.add_(dy.sum(0, /*keepdim=*/false, dbias.scalar_type()));
  if (!dweight.defined()) return;
  const at::ScalarType acc = dweight.scalar_type();
  if (acc == x.scalar_type())
    dweight.addmm_(dy.t(), x);
  else if (x.is_cuda())
    at::addmm_outf(dweight, dy.t(), x, acc, 1, 1, dweight);
  else
    dweight.addmm_(dy.t().to(acc), x.to(acc));
}

}  // namespace flashbpt
