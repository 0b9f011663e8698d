#include "attention.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>

#include "attention_call.h"
#include "cpu/attention.h"

namespace flashbpt {
namespace {

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

at::Tensor empty_lse(const AttentionCall& call, const at::Tensor& q) {
  const auto options = q.options().dtype(accumulation_dtype(q.scalar_type()));
  if (call.packed()) {
    // Rows outside every sequence have no keys.
    return at::full({q.size(0), q.size(1)}, -INFINITY, options);
  }
  return at::empty({q.size(0), q.size(1), q.size(2)}, options);
}

void launch_checks(AttentionCall& call) {
  const Backend backend = call.choose();
  TORCH_INTERNAL_ASSERT(backend == Backend::kCpu);  // the one that has attention kernels so far
  call.prepare_launch();
}

// Where a kernel adds its part of a gradient: the given tensor itself if it has the accumulation
// type and one copy is enough, else `partials` zeroed copies that `add_to` sums.
struct Accumulator {
  at::Tensor target, copies;  // copies: undefined where the target itself is added into

  Accumulator(const at::Tensor& target, at::ScalarType dtype, int64_t partials) : target(target) {
    if (target.scalar_type() == dtype && partials == 1) return;
    std::vector<int64_t> sizes{partials};
    sizes.insert(sizes.end(), target.sizes().begin(), target.sizes().end());
    copies = at::zeros(sizes, target.options().dtype(dtype));
  }
  at::Tensor first() const { return copies.defined() ? copies[0] : target; }
  int64_t partial_stride() const { return copies.defined() ? copies.stride(0) : 0; }
  void write() const {
    if (copies.defined()) target.copy_(copies.sum(0));
  }
  void add() const {
    if (copies.defined()) target.add_(copies.sum(0));
  }
};

struct RowGradients {
  at::Tensor dq, dmask, dsinks, dalibi;
};

// Everything but dk and dv: allocates, runs the kernel, brings the results into their types.
RowGradients run_backward(AttentionCall& call, const at::Tensor& grad_out,
                          const std::optional<at::Tensor>& grad_lse, const at::Tensor& q,
                          const AttentionSaved& saved, const std::array<bool, 6>& need,
                          int64_t partials, AttentionBackwardParams& p) {
  const at::ScalarType acc = accumulation_dtype(q.scalar_type());
  const at::TensorOptions options = q.options().dtype(acc);
  p.partials = partials;
  p.grad_out = call.view(grad_out);
  if (grad_lse && grad_lse->defined()) p.grad_lse = call.lse_view(*grad_lse);
  p.out = call.view(saved.out);
  p.lse = call.lse_view(saved.lse);
  if (saved.lse_lo && saved.lse_lo->defined() && saved.lse_lo->numel() > 0) {
    p.lse_lo = call.lse_view(*saved.lse_lo);
  }
  RowGradients g;
  if (need[0]) {
    g.dq = empty_in_stride_order(q, q.sizes(), q.scalar_type());
    if (call.packed()) g.dq.zero_();
    p.dq = call.view(g.dq);
  }
  if (need[3] && call.has_additive_mask()) {
    g.dmask = at::zeros(call.options.mask->sizes(), options);
    p.dmask = broadcast_view(g.dmask);
  }
  const auto per_head = [&](at::Tensor& t, TensorView& view) {
    t = at::zeros({partials, p.batch, p.heads_q}, options);
    view = {t.data_ptr(), data_type(acc), t.stride(1), t.stride(2), t.stride(0), 0};
  };
  if (need[4] && call.has_sinks()) per_head(g.dsinks, p.dsinks);
  if (need[5] && call.has_alibi()) per_head(g.dalibi, p.dalibi);
  cpu::attention_backward(p);
  if (g.dmask.defined()) g.dmask = g.dmask.to(call.options.mask->scalar_type());
  if (g.dsinks.defined()) {
    g.dsinks = g.dsinks.sum(at::IntArrayRef{0, 1}).to(call.options.sinks->scalar_type());
  }
  if (g.dalibi.defined()) {
    const at::Tensor& slopes = *call.options.alibi_slopes;
    g.dalibi = slopes.dim() == 2 ? g.dalibi.sum(0) : g.dalibi.sum(at::IntArrayRef{0, 1});
    g.dalibi = g.dalibi.to(slopes.scalar_type());
  }
  return g;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const AttentionOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  AttentionCall call(q, k, v, options);
  launch_checks(call);
  std::vector<int64_t> sizes = q.sizes().vec();
  sizes.back() = v.size(-1);
  at::Tensor out = empty_in_stride_order(q, sizes, q.scalar_type());
  if (call.packed()) out.zero_();
  at::Tensor lse = empty_lse(call, q);
  const bool additive = call.has_additive_mask();
  at::Tensor lse_lo = additive ? at::zeros_like(lse) : at::empty({0}, lse.options());
  at::Tensor mask_tiles = at::empty({0}, q.options().dtype(at::kByte));
  call.params.out = call.view(out);
  call.params.lse = call.lse_view(lse);
  if (additive) call.params.lse_lo = call.lse_view(lse_lo);
  cpu::attention_forward(call.params);
  return {out, lse, lse_lo, mask_tiles};
}

Gradients attention_backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse,
                             const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionSaved& saved, const AttentionOptions& options,
                             bool /*deterministic: the CPU always is*/,
                             const std::array<bool, 6>& need) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  AttentionCall call(q, k, v, options);
  launch_checks(call);
  call.check_saved(grad_out, grad_lse, saved);
  AttentionBackwardParams p{call.params};
  const at::ScalarType acc = accumulation_dtype(q.scalar_type());
  const int64_t partials = cpu::backward_partials(p);
  at::Tensor dk, dv;
  std::optional<Accumulator> dk_sum, dv_sum;
  if (need[1]) {
    dk = empty_in_stride_order(k, k.sizes(), k.scalar_type()).zero_();
    dk_sum.emplace(dk, acc, partials);
    p.dk = call.view(dk_sum->first());
    p.dk_partial_stride = dk_sum->partial_stride();
  }
  if (need[2]) {
    dv = empty_in_stride_order(v, v.sizes(), v.scalar_type()).zero_();
    dv_sum.emplace(dv, acc, partials);
    p.dv = call.view(dv_sum->first());
    p.dv_partial_stride = dv_sum->partial_stride();
  }
  RowGradients g = run_backward(call, grad_out, grad_lse, q, saved, need, partials, p);
  if (dk_sum) dk_sum->write();
  if (dv_sum) dv_sum->write();
  return {g.dq, dk, dv, g.dmask, g.dsinks, g.dalibi};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward_accumulate(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const AttentionSaved& saved,
    const AttentionOptions& options, bool /*deterministic*/, const std::array<bool, 6>& need,
    at::Tensor dk, at::Tensor dv) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  AttentionCall call(q, k, v, options);
  launch_checks(call);
  call.check_saved(grad_out, grad_lse, saved);
  const at::ScalarType acc = accumulation_dtype(q.scalar_type());
  call.check_accumulator("dk", dk, k);
  call.check_accumulator("dv", dv, v);
  at::assert_no_overlap(dk, dv);
  AttentionBackwardParams p{call.params};
  const int64_t partials = cpu::backward_partials(p);
  const Accumulator dk_sum(dk, acc, partials), dv_sum(dv, acc, partials);
  if (need[1]) {
    p.dk = call.view(dk_sum.first());
    p.dk_partial_stride = dk_sum.partial_stride();
  }
  if (need[2]) {
    p.dv = call.view(dv_sum.first());
    p.dv_partial_stride = dv_sum.partial_stride();
  }
  RowGradients g = run_backward(call, grad_out, grad_lse, q, saved, need, partials, p);
  if (need[1]) dk_sum.add();
  if (need[2]) dv_sum.add();
  return {g.dq, g.dmask, g.dsinks, g.dalibi};
}

std::string attention_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionOptions& options, bool /*backward*/) {
  const AttentionCall call(q, k, v, options);
  std::string kernel = "none", reasons;
  for (const auto& [backend, name] : kBackends) {
    if (const char* reason = call.refusal(backend)) {
      reasons += std::string("\n") + name + ": " + reason;
    } else if (kernel == "none") {
      kernel = name;
    }
  }
  return kernel + reasons;
}

at::Tensor dropout_mask(const at::Tensor& rng_state, double p, at::IntArrayRef sizes,
                        at::IntArrayRef offsets) {
  TORCH_CHECK(sizes.size() == 4 && offsets.size() == 5,
              "flashbpt: dropout_mask takes 4 sizes "
              "(batch, heads, len_q, len_k) and 5 offsets (batch, head, q, k, total_heads); got ",
              sizes.size(), " and ", offsets.size());
  TORCH_CHECK(rng_state.is_cpu(), "flashbpt: dropout_mask runs on the CPU; rng_state is on ",
              rng_state.device());
  AttentionParams params;
  params.batch_offset = offsets[0];
  params.head_offset = offsets[1];
  params.q_offset = offsets[2];
  params.k_offset = offsets[3];
  params.total_heads = offsets[4] > 0 ? offsets[4] : sizes[1];
  set_dropout(params, p);
  set_rng_state(params, rng_state, rng_state);
  params.batch = sizes[0];
  params.heads_q = params.heads_kv = sizes[1];
  params.len_q = sizes[2];
  params.len_k = sizes[3];
  at::Tensor keep = at::full(sizes, true, rng_state.options().dtype(at::kBool));
  if (params.dropout_threshold > 0) cpu::dropout_mask(params, keep.data_ptr<bool>());
  return keep;
}

at::Tensor draw_rng_state(const at::Tensor& like, int64_t increment) {
  TORCH_CHECK(increment >= 0, "flashbpt: increment must be >= 0, got ", increment);
  TORCH_CHECK(like.is_cpu(),
              "flashbpt: this build draws dropout states on the CPU only; got a "
              "tensor on ",
              like.device());
  auto generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  at::Tensor state = at::empty({2}, like.options().dtype(at::kLong));
  int64_t* data = state.data_ptr<int64_t>();
  data[0] = static_cast<int64_t>(generator->random64());
  data[1] = static_cast<int64_t>(generator->random64());
  return state;
}

}  // namespace flashbpt
