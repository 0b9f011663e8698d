#include "attention.h"

#include <ATen/DeviceGuard.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention_backends.h"
#include "backend.h"

namespace flashbpt {
namespace {

// Why a backend does not serve a call; null where it does. The backward of what sm90 was forced to
// do is any backend's that has one: out and LSE mean the same in all.
const char* refusal(const AttentionCall& call, Backend backend, bool backward) {
  auto forced = static_cast<Backend>(call.options.backend);
  if (backward && forced == Backend::kSm90) forced = Backend::kAuto;
  if (forced != Backend::kAuto && forced != backend) return "use_backend forces another one";
  if (backend == Backend::kCpu) {
    return call.q.is_cpu() ? nullptr : "the tensors are not on the CPU";
  }
  if (backend == Backend::kAten) {
    if (forced == Backend::kAten) return nullptr;
    return call.q.is_cuda() && call.acc == at::kDouble
               ? nullptr
               : "it holds all scores in memory, and serves only float64 on a GPU unless forced";
  }
  if (!call.q.is_cuda()) return "the tensors are not on a GPU";
  if (backend == Backend::kSm80) return refusal_sm80(call);
  return backward ? "it has no backward" : refusal_sm90(call);
}

Backend choose(const AttentionCall& call, bool backward) {
  return choose_backend(call.q.device(),
                        [&](Backend backend) { return refusal(call, backend, backward); });
}

// [sizes] with the dimensions in the stride order of `like` and the last one innermost. Where
// `like` repeats memory (stride 0) the order means nothing and the result is contiguous.
at::Tensor empty_in_stride_order(const at::Tensor& like, at::IntArrayRef sizes,
                                 at::ScalarType dtype) {
  const int64_t n = like.dim();
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  bool repeats = false;
  for (int64_t d = 0; d < n; ++d) repeats |= like.stride(d) == 0 && like.size(d) > 1;
  if (!repeats) {
    std::stable_sort(order.begin(), order.end() - 1,
                     [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
  }
  std::vector<int64_t> strides(n);
  int64_t step = 1;
  for (int64_t i = n - 1; i >= 0; --i) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return at::empty_strided(sizes, strides, like.options().dtype(dtype));
}

// Rows outside every packed sequence are 0, and no kernel visits them.
at::Tensor empty_like_input(const AttentionCall& call, const at::Tensor& like,
                            at::IntArrayRef sizes) {
  at::Tensor t = empty_in_stride_order(like, sizes, like.scalar_type());
  return call.packed() ? t.zero_() : t;
}

ForwardTensors forward_tensors(const AttentionCall& call) {
  ForwardTensors t;
  std::vector<int64_t> sizes = call.q.sizes().vec();
  sizes.back() = call.params.dim_v;
  t.out = empty_like_input(call, call.q, sizes);
  sizes.pop_back();
  const auto options = call.q.options().dtype(call.acc);
  t.lse = call.packed() ? at::full(sizes, -INFINITY, options) : at::empty(sizes, options);
  t.lse_lo = call.has_additive_mask() ? at::empty_like(t.lse) : at::empty({0}, options);
  t.mask_tiles = call.q.is_cuda() && call.has_boolean_mask()
                     ? mask_tiles(*call.options.mask)
                     : at::empty({0}, options.dtype(at::kByte));
  return t;
}

// Runs the backward of a checked call and brings the gradients of its terms into their types.
void run_backward(AttentionCall& call, BackwardTensors& t, const std::array<bool, 6>& need) {
  const Backend backend = choose(call, /*backward=*/true);
  call.prepare_launch();
  call.check_saved(t.grad_out, t.grad_lse, t.saved);
  const auto allocate = [&](bool needed, const at::Tensor& like) {
    return needed ? empty_like_input(call, like, like.sizes()) : at::Tensor();
  };
  t.dq = allocate(need[0], call.q);
  if (!t.accumulate) {
    t.dk = allocate(need[1], call.k);
    t.dv = allocate(need[2], call.v);
  }
  if (need[3] && call.has_additive_mask()) {
    t.dmask = at::zeros(call.options.mask->sizes(), call.q.options().dtype(call.acc));
  }
  t.need_dsinks = need[4] && call.has_sinks();
  t.need_dalibi = need[5] && call.has_alibi();
  if (backend == Backend::kSm80) {
    backward_sm80(call, t);
  } else if (backend == Backend::kAten) {
    backward_aten(call, t);
  } else {
    backward_cpu(call, t);
  }
  if (t.dmask.defined()) t.dmask = t.dmask.to(call.options.mask->scalar_type());
  if (t.dsinks.defined()) {
    t.dsinks = t.dsinks.sum(at::IntArrayRef{0, 1}).to(call.options.sinks->scalar_type());
  }
  if (t.dalibi.defined()) {
    const at::Tensor& slopes = *call.options.alibi_slopes;
    t.dalibi = slopes.dim() == 2 ? t.dalibi.sum(0) : t.dalibi.sum(at::IntArrayRef{0, 1});
    t.dalibi = t.dalibi.to(slopes.scalar_type());
  }
}

}  // namespace

AttentionBackwardParams backward_params(const AttentionCall& call, const BackwardTensors& t) {
  AttentionBackwardParams p{call.params};
  p.grad_out = call.view(t.grad_out);
  if (t.grad_lse && t.grad_lse->defined()) p.grad_lse = call.lse_view(*t.grad_lse);
  p.out = call.view(t.saved.out);
  p.lse = call.lse_view(t.saved.lse);
  const std::optional<at::Tensor>& lse_lo = t.saved.lse_lo;
  if (lse_lo && lse_lo->defined() && lse_lo->numel() > 0) p.lse_lo = call.lse_view(*lse_lo);
  if (t.dq.defined()) p.dq = call.view(t.dq);
  if (t.dmask.defined()) p.dmask = broadcast_view(t.dmask);
  return p;
}

Accumulator::Accumulator(const AttentionCall& call, const at::Tensor& target, int64_t copies,
                         bool add)
    : target_(target), add_(add) {
  if (!target.defined()) return;
  if (target.scalar_type() == call.acc && has_unit_columns(target) && copies == 1) {
    if (!add) target_.zero_();
    return;
  }
  std::vector<int64_t> sizes{copies};
  sizes.insert(sizes.end(), target.sizes().begin(), target.sizes().end());
  copies_ = at::zeros(sizes, target.options().dtype(call.acc));
}

TensorView Accumulator::view(const AttentionCall& call) const {
  if (!target_.defined()) return {};
  return call.view(copies_.defined() ? copies_[0] : target_);
}

void Accumulator::finish() const {
  if (!copies_.defined()) return;
  const at::Tensor sum = copies_.size(0) == 1 ? copies_[0] : copies_.sum(0);
  if (add_) {
    target_.add_(sum);
  } else {
    target_.copy_(sum);
  }
}

at::Tensor zero_parts(const AttentionCall& call, int64_t parts, int64_t batch, TensorView& view) {
  at::Tensor t = at::zeros({parts, batch, call.params.heads_q}, call.q.options().dtype(call.acc));
  view = {t.data_ptr(), data_type(call.acc), batch == 1 ? 0 : t.stride(1),
          t.stride(2),  t.stride(0),         0};
  return t;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const AttentionOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::DeviceGuard device_guard(q.device());
  AttentionCall call(q, k, v, options);
  const Backend backend = choose(call, /*backward=*/false);
  call.prepare_launch();
  ForwardTensors t = forward_tensors(call);
  AttentionParams& p = call.params;
  p.out = call.view(t.out);
  p.lse = call.lse_view(t.lse);
  if (call.has_additive_mask()) p.lse_lo = call.lse_view(t.lse_lo);
  if (backend == Backend::kSm90) {
    forward_sm90(call, t);
  } else if (backend == Backend::kSm80) {
    forward_sm80(call, t);
  } else if (backend == Backend::kAten) {
    forward_aten(call, t);
  } else {
    forward_cpu(call, t);
  }
  return {t.out, t.lse, t.lse_lo, t.mask_tiles};
}

Gradients attention_backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse,
                             const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionSaved& saved, const AttentionOptions& options,
                             bool deterministic, const std::array<bool, 6>& need) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::DeviceGuard device_guard(q.device());
  AttentionCall call(q, k, v, options);
  BackwardTensors t{grad_out, grad_lse, saved, deterministic, /*accumulate=*/false};
  run_backward(call, t, need);
  return {t.dq, t.dk, t.dv, t.dmask, t.dsinks, t.dalibi};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward_accumulate(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const AttentionSaved& saved,
    const AttentionOptions& options, bool deterministic, const std::array<bool, 6>& need,
    at::Tensor dk, at::Tensor dv) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::DeviceGuard device_guard(q.device());
  AttentionCall call(q, k, v, options);
  call.check_accumulator("dk", dk, k);
  call.check_accumulator("dv", dv, v);
  at::assert_no_overlap(dk, dv);
  BackwardTensors t{grad_out, grad_lse, saved, deterministic, /*accumulate=*/true};
  if (need[1]) t.dk = dk;
  if (need[2]) t.dv = dv;
  run_backward(call, t, need);
  return {t.dq, t.dmask, t.dsinks, t.dalibi};
}

std::string attention_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionOptions& options, bool backward) {
  const AttentionCall call(q, k, v, options);
  return describe_backends([&](Backend backend) { return refusal(call, backend, backward); },
                           [&](Backend backend) {
                             if (backend == Backend::kSm90) return kernel_sm90(call);
                             return backend == Backend::kSm80 ? kernel_sm80(call, backward)
                                                              : std::string();
                           });
}

}  // namespace flashbpt
