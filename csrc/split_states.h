// What the parts of a call's keys leave, until they are merged.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "merge_states.h"
#include "sm80/attn_params.h"

namespace flashbpt {

struct SplitStates {
  at::Tensor outs, lses;  // [parts, ...] fp32, of the shapes of the call's
  sm80::KeySplits params;

  // One part needs no states. view and lse_view make TensorViews of one part.
  template <typename View, typename LseView>
  SplitStates(int count, const at::Tensor& out, bool writes_all_rows, View view, LseView lse_view) {
    params.count = count;
    if (count == 1) return;
    const auto options = out.options().dtype(at::kFloat);
    std::vector<int64_t> sizes{count};
    sizes.insert(sizes.end(), out.sizes().begin(), out.sizes().end());
    outs = at::empty(sizes, options);
    sizes.pop_back();
    // A row that is not written: states without keys, whose `outs` are never read.
    lses = writes_all_rows ? at::empty(sizes, options) : at::full(sizes, -INFINITY, options);
    params.out = view(outs[0]);
    params.lse = lse_view(lses[0]);
    params.out_stride = outs.stride(0);
    params.lse_stride = lses.stride(0);
  }

  // (out, lse) of all parts.
  std::tuple<at::Tensor, at::Tensor> merged() const {
    return merge_attention_states(outs.unbind(), lses.unbind());
  }
};

}  // namespace flashbpt
