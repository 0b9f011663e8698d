#include "blockwise_ffn.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "blockwise_check.h"
#include "linear.h"

namespace flashbpt {

FfnWeights ffn_weights(const BlockTensors& w) {
  return {w[kWGate], w[kWUp], w[kWDown], w[kBGate], w[kBUp], w[kBDown]};
}

FfnHidden ffn_hidden(const at::Tensor& x, const FfnWeights& w) {
  FfnHidden hidden;
  const std::array<int64_t, 2> sizes{x.size(0), w.w_up.size(0)};
  hidden.up = at::empty(sizes, x.options());
  linear(x, w.w_up, w.b_up, hidden.up);
  if (w.w_gate.defined()) {
    hidden.gate = at::empty(sizes, x.options());
    linear(x, w.w_gate, w.b_gate, hidden.gate);
  }
  return hidden;
}

void ffn_output(const FfnHidden& hidden, const FfnWeights& w, Activation activation,
                const at::Tensor& bias, const at::Tensor& out) {
  activation_forward(hidden.gate, hidden.up, activation, hidden.up);
  linear(hidden.up, w.w_down, bias, out);
}

void ffn_gradients(const at::Tensor& dy, const at::Tensor& x, const FfnHidden& hidden,
                   const FfnWeights& w, Activation activation, const FfnWeights& grads,
                   const at::Tensor& dx) {
  const at::Tensor da = at::empty_like(hidden.up);
  linear_input_gradient(dy, w.w_down, da, false);
  activation_backward(da, hidden.gate, hidden.up, activation);
  // da is the activation's output now, gate and up are their gradients.
  linear_weight_gradients(dy, da, grads.w_down, grads.b_down);
  linear_weight_gradients(hidden.up, x, grads.w_up, grads.b_up);
  if (w.w_gate.defined()) linear_weight_gradients(hidden.gate, x, grads.w_gate, grads.b_gate);
  if (!dx.defined()) return;
  linear_input_gradient(hidden.up, w.w_up, dx, false);
  if (w.w_gate.defined()) linear_input_gradient(hidden.gate, w.w_gate, dx, true);
}

int64_t block_rows(int64_t asked, int64_t tokens) {
  // Products are at their rate from some thousand rows on, and 8192 pay for the gradients of
  // weights that each block reads and writes; fewer tokens are two blocks, so that something is
  // saved.
  constexpr int64_t kMost = 8192, kLeast = 2048;
  const int64_t rows = asked > 0 ? asked : std::clamp((tokens + 1) / 2, kLeast, kMost);
  // Where dropout draws, blocks begin at multiples of 16.
  return std::max<int64_t>(std::min((rows + 15) / 16 * 16, tokens), 1);
}

namespace {

// f(begin, rows of x, ...) for each block of rows.
template <typename F>
void for_each_block(int64_t tokens, int64_t rows, F f) {
  for (int64_t begin = 0; begin < tokens; begin += rows) f(begin, std::min(rows, tokens - begin));
}

}  // namespace

at::Tensor blockwise_ffn_forward(const at::Tensor& x, const FfnWeights& w, Activation activation,
                                 int64_t rows) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  check_ffn_rows(x, w);
  const c10::DeviceGuard device_guard(x.device());
  const at::Tensor flat = x.reshape({-1, x.size(-1)});
  const at::Tensor out = at::empty(x.sizes(), x.options());
  const at::Tensor flat_out = out.view(flat.sizes());
  const int64_t tokens = flat.size(0);
  for_each_block(tokens, block_rows(rows, tokens), [&](int64_t begin, int64_t count) {
    ffn_output(ffn_hidden(flat.narrow(0, begin, count), w), w, activation, w.b_down,
               flat_out.narrow(0, begin, count));
  });
  return out;
}

at::Tensor blockwise_ffn_backward(const at::Tensor& dy, const at::Tensor& x, const FfnWeights& w,
                                  Activation activation, int64_t rows, const FfnWeights& grads,
                                  bool need_dx) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  check_ffn_rows(x, w);
  const c10::DeviceGuard device_guard(x.device());
  const at::Tensor flat = x.reshape({-1, x.size(-1)});
  const at::Tensor flat_dy = dy.reshape(flat.sizes());
  at::Tensor dx, flat_dx;
  if (need_dx) {
    dx = at::empty(x.sizes(), x.options());
    flat_dx = dx.view(flat.sizes());
  }
  const int64_t tokens = flat.size(0);
  for_each_block(tokens, block_rows(rows, tokens), [&](int64_t begin, int64_t count) {
    const at::Tensor block = flat.narrow(0, begin, count);
    ffn_gradients(flat_dy.narrow(0, begin, count).contiguous(), block, ffn_hidden(block, w), w,
                  activation, grads, need_dx ? flat_dx.narrow(0, begin, count) : at::Tensor());
  });
  return dx;
}

}  // namespace flashbpt
