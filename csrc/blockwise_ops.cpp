// The ops of the blockwise transformer: accumulators of gradients, and what has no value.
#include "blockwise.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "check.h"

namespace flashbpt {
namespace {

at::Tensor zeros_in_accumulation_type(const at::Tensor& weight, bool needed) {
  if (!needed || !weight.defined()) return {};
  const auto acc = accumulation_dtype(weight.scalar_type());
  return at::zeros(weight.sizes(), weight.options().dtype(acc));
}

// Frees the accumulator where the types differ.
at::Tensor in_type_of(const at::Tensor& weight, at::Tensor& gradient) {
  if (!gradient.defined()) return {};
  const at::Tensor cast = gradient.to(weight.scalar_type());
  gradient.reset();
  return cast;
}

}  // namespace

std::vector<at::Tensor> block_forward(const BlockInputs& inputs, const BlockTensors& weights,
                                      const BlockConfig& config, bool keep, bool return_kv) {
  const BlockResult r = transformer_block_forward(inputs, weights, config, keep, return_kv);
  const BlockSaved& s = r.saved;
  std::vector<at::Tensor> results{r.y, r.keys, r.values, s.out,  s.lse, s.q,
                                  s.k, s.v,    s.h,      s.gate, s.up,  s.x};
  for (at::Tensor& t : results)
    if (!t.defined()) t = at::empty({0}, inputs.x.options());
  return results;
}

std::vector<at::Tensor> block_backward(const at::Tensor& dy, const BlockInputs& inputs,
                                       const BlockTensors& weights, const BlockConfig& config,
                                       const BlockSaved& saved, const BlockNeeds& need,
                                       const MainGradients& main) {
  BlockTensors grads;
  for (size_t i = 0; i < kBlockWeights; ++i)
    grads[i] = zeros_in_accumulation_type(weights[i], need[1 + i]);
  TORCH_CHECK(main.tensors.size() == main.into.size(), "flashbpt: ", main.tensors.size(),
              " main_grads were given for ", main.into.size(), " weights");
  for (size_t i = 0; i < main.into.size(); ++i) {
    at::Tensor& gradient = grads.at(main.into[i]);
    if (!gradient.defined()) continue;
    const at::Tensor& given = main.tensors[i];
    TORCH_CHECK(given.sizes() == gradient.sizes() &&
                    given.scalar_type() == gradient.scalar_type() &&
                    given.device() == gradient.device(),
                "flashbpt: main_grad of weight ", main.into[i], " must be ", gradient.scalar_type(),
                " of shape ", gradient.sizes(), " on ", gradient.device(), ", got ",
                given.scalar_type(), " of shape ", given.sizes(), " on ", given.device());
    gradient = given;
  }
  std::vector<at::Tensor> results{
      transformer_block_backward(dy, inputs, weights, config, saved, grads, need[0])};
  for (const int64_t i : main.into) grads[i].reset();
  for (size_t i = 0; i < kBlockWeights; ++i) results.push_back(in_type_of(weights[i], grads[i]));
  return results;
}

std::vector<at::Tensor> ffn_backward(const at::Tensor& dy, const at::Tensor& x, const FfnWeights& w,
                                     Activation activation, int64_t rows,
                                     const std::array<bool, 7>& need) {
  const std::array<at::Tensor, 6> weights{w.w_gate, w.w_up, w.w_down, w.b_gate, w.b_up, w.b_down};
  std::array<at::Tensor, 6> g;
  for (size_t i = 0; i < g.size(); ++i) g[i] = zeros_in_accumulation_type(weights[i], need[1 + i]);
  std::vector<at::Tensor> results{blockwise_ffn_backward(
      dy, x, w, activation, rows, {g[0], g[1], g[2], g[3], g[4], g[5]}, need[0])};
  for (size_t i = 0; i < g.size(); ++i) results.push_back(in_type_of(weights[i], g[i]));
  return results;
}

}  // namespace flashbpt
