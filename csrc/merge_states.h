#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace flashbpt {

// Attention over the union of disjoint sets of keys from the attention over each set:
//   lse = log sum_i exp(lse_i)      out = sum_i exp(lse_i - lse) out_i
// outs: n >= 1 tensors [..., D]; lses: n tensors [...], natural logarithm, fp32 (fp64 with fp64
// outs). Returns contiguous (out [..., D], lse [...]) in the dtypes of the inputs.
std::tuple<at::Tensor, at::Tensor> merge_attention_states(at::TensorList outs, at::TensorList lses);

}  // namespace flashbpt
