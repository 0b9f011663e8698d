// What every backend of attention implements. The ops (attention.cpp) check a call, pick the
// backend and allocate what they return; the backend fills it.
#pragma once

#include <string>

#include "attention/mask_tiles.h"
#include "attention_call.h"

namespace flashbpt {

struct ForwardTensors {
  at::Tensor out;         // [B, H, L, Dv] or [T, H, Dv]; packed: zero
  at::Tensor lse;         // [B, H, L] or [T, H]; packed: -inf
  at::Tensor lse_lo;      // as lse; empty without an additive mask
  at::Tensor mask_tiles;  // see attention/mask_tiles.h; empty where no kernel reads it
};

struct BackwardTensors {
  at::Tensor grad_out;
  std::optional<at::Tensor> grad_lse;
  AttentionSaved saved;
  bool deterministic;
  bool accumulate;  // dk and dv are given, in the accumulation type, and added into

  // Undefined where not asked for.
  at::Tensor dq;      // in q's type; packed: zero
  at::Tensor dk, dv;  // unless given: in their inputs' type; packed: zero
  at::Tensor dmask;   // [the mask's sizes], accumulation type, zero
  // Allocated by the backend, [parts, batch, heads_q] in the accumulation type, and summed after.
  bool need_dsinks, need_dalibi;
  at::Tensor dsinks, dalibi;
};

// The call with the views of what came in, of dq and of dmask.
AttentionBackwardParams backward_params(const AttentionCall& call, const BackwardTensors& t);

// Where a kernel adds its part of dk or dv in the accumulation type: the target itself if it has
// that type and one copy is enough, else zeroed copies that `finish` sums into it.
class Accumulator {
 public:
  // add: to what the target holds, instead of writing it. An undefined target is not asked for.
  Accumulator(const AttentionCall& call, const at::Tensor& target, int64_t copies, bool add);
  TensorView view(const AttentionCall& call) const;
  int64_t copy_stride() const { return copies_.defined() ? copies_.stride(0) : 0; }
  void finish() const;

 private:
  at::Tensor target_, copies_;
  bool add_;
};

// Zeros [parts, batch, heads_q] in the accumulation type, seen along `row`, `batch` and `head`.
at::Tensor zero_parts(const AttentionCall& call, int64_t parts, int64_t batch, TensorView& view);

void forward_cpu(const AttentionCall& call, ForwardTensors& t);
void backward_cpu(const AttentionCall& call, BackwardTensors& t);

void forward_aten(const AttentionCall& call, ForwardTensors& t);
void backward_aten(const AttentionCall& call, BackwardTensors& t);

// Why the kernels of sm90, which have a forward alone, do not serve a call on the GPU; null where
// they do.
const char* refusal_sm90(const AttentionCall& call);
// Which row of the kernel's config.h serves it.
std::string kernel_sm90(const AttentionCall& call);
void forward_sm90(const AttentionCall& call, ForwardTensors& t);

// Why the kernels of sm80 do not serve a call on the GPU; null where they do.
const char* refusal_sm80(const AttentionCall& call);
// Which row of the kernel's config.h serves it.
std::string kernel_sm80(const AttentionCall& call, bool backward);
void forward_sm80(const AttentionCall& call, ForwardTensors& t);
void backward_sm80(const AttentionCall& call, BackwardTensors& t);
// Pieces of a boolean mask that are empty or full; every CUDA backend saves them.
at::Tensor mask_tiles(const at::Tensor& mask);
#ifdef FLASHBPT_WITH_CUDA
MaskTiles mask_tiles_view(const at::Tensor& tiles);  // of none: no data
#endif

}  // namespace flashbpt
