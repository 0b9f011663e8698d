#pragma once

#include <cuda_runtime_api.h>

#include "../../merge_states_params.h"

namespace flashbpt::sm80 {

// States one launch takes: as many as keep the struct far from the 4 KB of kernel parameters.
constexpr int kMaxMergeStates = 32;

// More states go in groups. A group that is not the last leaves its sums unscaled in the
// accumulation type (fp64 for fp64 outs, else fp32), so nothing is rounded between groups:
//   sums [rows, D]; max_sum [rows, 2]: the largest LSE so far and the sum of exp(lse_i - it)
// The threads of a row all read max_sum and one writes it, so input and output are two buffers;
// each element of `sums` belongs to one thread, so there one buffer serves.
struct MergeCarry {
  void* sums = nullptr;
  const void* max_sum_in = nullptr;  // null: the first group
  void* max_sum_out = nullptr;       // null: the last group
};

struct MergeStatesParams {
  MergeShape shape;
  MergeState states[kMaxMergeStates];
  int num_states = 0;
  bool vectorised = false;  // every out row starts at a multiple of 16 bytes, D too
  MergeCarry carry;
  void* out = nullptr;  // [rows, D] contiguous; written by the last group
  void* lse = nullptr;  // [rows] contiguous; written by the last group
};
static_assert(sizeof(MergeStatesParams) <= 4096, "kernel parameters are limited to 4 KB");

// rows > 0, D < 2^31. The caller checks for launch errors.
void launch_merge_states(const MergeStatesParams& params, cudaStream_t stream);

}  // namespace flashbpt::sm80
