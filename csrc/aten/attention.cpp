// Attention by plain ATen calls over all scores in memory: float64 on the GPU, where gradcheck asks
// for it, and whatever `use_backend("aten")` sends here. It has the equations of the CPU backend
// (docs/attention_cpu.md), a dense call or one packed sequence at a time.
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "../attention/sequence.h"
#include "../attention_backends.h"

namespace flashbpt {
namespace {

// All batches of a dense call, or one packed sequence, with its tensors as [b, heads, rows, ...].
struct Part {
  const AttentionCall& call;
  Sequence seq;
  int64_t batch;

  at::Tensor rows(const at::Tensor& t, int64_t begin, int64_t length) const {
    return call.packed() ? t.narrow(0, begin, length).transpose(0, 1).unsqueeze(0) : t;
  }
  at::Tensor queries(const at::Tensor& t) const { return rows(t, seq.q_begin, seq.len_q); }
  at::Tensor keys(const at::Tensor& t) const { return rows(t, seq.k_begin, seq.len_k); }
};

template <typename F>
void for_each_part(const AttentionCall& call, const F& f) {
  AttentionParams p = call.params;
  if (p.batch == 0 || p.heads_q == 0 || p.len_q == 0) return;
  if (!p.packed()) return f(Part{call, sequence_of(p, 0), p.batch});
  const at::Tensor cu_q = call.options.cu_seqlens_q->cpu(), cu_k = call.options.cu_seqlens_k->cpu();
  p.cu_seqlens_q = cu_q.data_ptr();
  p.cu_seqlens_k = cu_k.data_ptr();
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence seq = sequence_of(p, b);
    if (seq.len_q > 0) f(Part{call, seq, 1});
  }
}

// [b, heads, rows, cols] as [b, kv_heads, group * rows, cols]: a group meets its keys in one
// product.
at::Tensor by_group(const Part& part, const at::Tensor& t) {
  const AttentionParams& p = part.call.params;
  return t.reshape({part.batch, p.heads_kv, p.group() * part.seq.len_q, t.size(-1)});
}

// a b^T of every query head with its kv head: [b, heads_q, len_q, len_k]
at::Tensor with_keys(const Part& part, const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor product = at::matmul(by_group(part, a), b.transpose(-2, -1));
  return product.reshape({part.batch, part.call.params.heads_q, part.seq.len_q, part.seq.len_k});
}

struct Scores {
  at::Tensor q, k, v;   // [b, heads, rows, dim], accumulation type
  at::Tensor s;         // [b, heads_q, len_q, len_k], -inf where hidden
  at::Tensor tanh;      // of score / softcap; undefined without softcap
  at::Tensor distance;  // [len_q, len_k], |row + shift - key|
  at::Tensor hidden;    // broadcasts to s
  at::Tensor kept;      // what dropout makes of a weight, 0 or 1 / (1 - p); undefined without
};

Scores scores_of(const Part& part) {
  const AttentionCall& call = part.call;
  const AttentionParams& p = call.params;
  const Sequence& seq = part.seq;
  Scores x;
  x.q = part.queries(call.q).to(call.acc);
  x.k = part.keys(call.k).to(call.acc);
  x.v = part.keys(call.v).to(call.acc);
  // S = scale * Q K^T
  x.s = with_keys(part, x.q, x.k) * p.scale;
  if (p.softcap > 0) {
    x.tanh = (x.s / p.softcap).tanh();
    x.s = x.tanh * p.softcap;
  }
  const auto index = call.q.options().dtype(at::kLong);
  const at::Tensor ahead =
      at::arange(seq.len_q, index).unsqueeze(1) + seq.shift - at::arange(seq.len_k, index);
  x.distance = ahead.abs().to(call.acc);
  if (p.alibi) {
    at::Tensor slopes = call.slopes.view({-1, p.heads_q, 1, 1});
    if (call.packed() && p.alibi.batch != 0) slopes = slopes.narrow(0, seq.batch, 1);
    x.s = x.s - slopes * x.distance;
  }
  x.hidden = (ahead > p.band.left).logical_or(ahead < -p.band.right);
  if (call.has_boolean_mask()) x.hidden = x.hidden.logical_or(call.options.mask->logical_not());
  if (call.has_additive_mask()) x.s = x.s + call.options.mask->to(call.acc);
  x.s = x.s.masked_fill(x.hidden, -INFINITY);
  if (p.dropout_threshold > 0) {
    const at::Tensor keep = dropout_mask(
        *call.options.rng_state, call.options.dropout_p,
        {part.batch, p.heads_q, seq.len_q, seq.len_k},
        {seq.batch + p.batch_offset, p.head_offset, seq.q_origin, seq.k_origin, p.total_heads});
    x.kept = keep.to(call.acc) * p.dropout_scale;
  }
  return x;
}

void forward_part(const Part& part, ForwardTensors& t) {
  const AttentionCall& call = part.call;
  const Scores x = scores_of(part);
  const at::Tensor sink = call.has_sinks() ? call.sinks.view({1, -1, 1, 1})
                                           : at::full({1, 1, 1, 1}, -INFINITY, x.s.options());
  const at::Tensor column = sink.expand({part.batch, x.s.size(1), x.s.size(2), 1});
  const at::Tensor top = at::cat({x.s, column}, -1).amax(-1, /*keepdim=*/true);
  const at::Tensor reference = top.masked_fill(top == -INFINITY, 0);
  const at::Tensor e = (x.s - reference).exp();
  const at::Tensor sum = e.sum(-1, /*keepdim=*/true) + (column - reference).exp();
  at::Tensor weights = e / sum.masked_fill(sum == 0, 1);
  if (x.kept.defined()) weights = weights * x.kept;
  // O = P V; a row without keys is 0 whatever V holds.
  at::Tensor out = at::matmul(by_group(part, weights), x.v);
  out = out.reshape({part.batch, x.s.size(1), x.s.size(2), x.v.size(-1)});
  out = out.masked_fill((x.s == -INFINITY).all(-1, /*keepdim=*/true), 0);
  if (call.params.drops_all()) out = at::zeros_like(out);
  part.queries(t.out).copy_(out);
  const at::Tensor high = top.squeeze(-1).to(at::kDouble);
  const at::Tensor log_sum = sum.squeeze(-1).to(at::kDouble).log();
  const at::Tensor lse = (high + log_sum).to(call.acc);
  part.queries(t.lse).copy_(lse);
  if (call.has_additive_mask()) {
    part.queries(t.lse_lo).copy_(
        ((high - lse) + log_sum).masked_fill(lse.isfinite().logical_not(), 0));
  }
}

void backward_part(const Part& part, const AttentionBackwardParams& p, BackwardTensors& t) {
  const AttentionCall& call = part.call;
  const Scores x = scores_of(part);
  const auto column = [&](const at::Tensor& rows) { return part.queries(rows).unsqueeze(-1); };
  const at::Tensor lse = column(t.saved.lse);
  const at::Tensor lse_lo = p.lse_lo ? column(*t.saved.lse_lo) : at::zeros_like(lse);
  const at::Tensor dead = lse == -INFINITY;  // without keys: gradients 0, whatever arrives
  const at::Tensor hidden = x.hidden.logical_or(dead);
  const at::Tensor grad = part.queries(t.grad_out).to(call.acc).masked_fill(dead, 0);
  // delta = rowsum(dO * O) - dLSE
  at::Tensor delta = (grad * part.queries(t.saved.out)).sum(-1, /*keepdim=*/true);
  if (p.grad_lse) delta = delta - column(*t.grad_lse);
  const at::Tensor weights = ((x.s - lse) - lse_lo).exp().masked_fill(hidden, 0);
  if (t.need_dsinks) {
    const at::Tensor sink = ((call.sinks.view({1, -1, 1, 1}) - lse) - lse_lo).exp();
    const at::Tensor parts = (sink * delta).masked_fill(dead, 0).sum(at::IntArrayRef{2, 3});
    t.dsinks.sub_(parts.sum(0));
  }
  if (t.dv.defined()) {
    // dV = P^T dO
    const at::Tensor dropped = x.kept.defined() ? weights * x.kept : weights;
    part.keys(t.dv).add_(
        at::matmul(by_group(part, dropped).transpose(-2, -1), by_group(part, grad)));
  }
  // dP = dO V^T      dS = P * (dP - delta)
  at::Tensor dp = with_keys(part, grad, x.v);
  if (x.kept.defined()) dp = dp * x.kept;
  at::Tensor ds = (weights * (dp - delta)).masked_fill(hidden, 0);
  if (t.need_dalibi) {
    const at::Tensor sums = (ds * x.distance).sum(at::IntArrayRef{2, 3});
    t.dalibi[0].narrow(0, part.seq.batch, part.batch).sub_(sums);
  }
  if (t.dmask.defined()) t.dmask.add_(at::sum_to(ds, t.dmask.sizes()));
  if (x.tanh.defined()) ds = ds * (1 - x.tanh * x.tanh);
  ds = by_group(part, ds) * p.scale;
  // dQ = scale * dS K      dK = scale * dS^T Q
  if (t.dq.defined()) {
    part.queries(t.dq).copy_(at::matmul(ds, x.k).reshape(x.q.sizes()));
  }
  if (t.dk.defined()) {
    part.keys(t.dk).add_(at::matmul(ds.transpose(-2, -1), by_group(part, x.q)));
  }
}

}  // namespace

void forward_aten(const AttentionCall& call, ForwardTensors& t) {
  for_each_part(call, [&](const Part& part) { forward_part(part, t); });
}

void backward_aten(const AttentionCall& call, BackwardTensors& t) {
  AttentionBackwardParams p = backward_params(call, t);
  if (t.need_dsinks) t.dsinks = zero_parts(call, 1, 1, p.dsinks);
  if (t.need_dalibi) t.dalibi = zero_parts(call, 1, p.batch, p.dalibi);
  if (!t.accumulate) {
    if (t.dk.defined()) t.dk.zero_();
    if (t.dv.defined()) t.dv.zero_();
  }
  for_each_part(call, [&](const Part& part) { backward_part(part, p, t); });
}

}  // namespace flashbpt
