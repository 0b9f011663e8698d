// Host side of the CPU backend: as many copies of the gradients as keep all threads busy.
#include "attention_backends.h"
#include "cpu/attention.h"

namespace flashbpt {

void forward_cpu(const AttentionCall& call, ForwardTensors&) {
  cpu::attention_forward(call.params);
}

void backward_cpu(const AttentionCall& call, BackwardTensors& t) {
  AttentionBackwardParams p = backward_params(call, t);
  p.partials = cpu::backward_partials(p);
  const Accumulator dk(call, t.dk, p.partials, t.accumulate);
  const Accumulator dv(call, t.dv, p.partials, t.accumulate);
  p.dk = dk.view(call);
  p.dv = dv.view(call);
  p.dk_partial_stride = dk.copy_stride();
  p.dv_partial_stride = dv.copy_stride();
  if (t.need_dsinks) t.dsinks = zero_parts(call, p.partials, p.batch, p.dsinks);
  if (t.need_dalibi) t.dalibi = zero_parts(call, p.partials, p.batch, p.dalibi);
  cpu::attention_backward(p);
  dk.finish();
  dv.finish();
}

}  // namespace flashbpt
