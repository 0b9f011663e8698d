// The CPU backend of attention: serves everything, on ATen's matmul and at::parallel_for.
#pragma once

#include "../params.h"

namespace flashbpt::cpu {

void attention_forward(const AttentionParams& params);

// How many copies of dk, dv, dsinks and dalibi keep all threads busy (params.partials).
int64_t backward_partials(const AttentionParams& params);
void attention_backward(const AttentionBackwardParams& params);

// keep [batch, heads, len_q, len_k], contiguous. The sizes, offsets and seed are those of `params`.
void dropout_mask(const AttentionParams& params, bool* keep);

}  // namespace flashbpt::cpu
