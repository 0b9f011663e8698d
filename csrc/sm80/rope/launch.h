#pragma once

#include <cuda_runtime_api.h>

#include "../../attention/divisor.h"
#include "../../params.h"

namespace flashbpt::sm80 {

// Heads are [rows, heads, dim] along `row` and `head` of their views, columns are neighbours.
struct RopeParams {
  TensorView in;  // x; backward: dy, fp32 or of out's type
  TensorView out;
  const void* weight = nullptr;  // [dim]; null: heads have no norm
  float eps = 0;
  const float* cos = nullptr;  // [rows, pairs], contiguous; null: nothing turns
  const float* sin = nullptr;
  int pairs = 0;  // columns from 2 * pairs on stay
  bool interleaved = false;
  int64_t rows = 0;
  int heads = 0;
  int dim = 0;  // at most kRopeMaxNormDim where there is a weight

  // Set by the launch.
  Divisor row_places;  // a few neighbouring heads each
  int lanes = 32;      // of a head
  bool vectorised = false;
  float share = 0;  // 1 / dim
  float sign = 1;   // -1: turns back
};

// out = rope(norm(in))
void launch_rope(RopeParams p, cudaStream_t stream);

struct RopeBackwardParams : RopeParams {
  TensorView x;  // what the forward had; none where heads have no norm
  // [blocks, dim], of each block; null where not needed
  float* weight_partials = nullptr;
  int blocks = 0;  // rope_blocks(), where there are partials
};

// Blocks of a backward with partials on a GPU with so many multiprocessors.
int rope_blocks(const RopeParams& p, int multiprocessors);

// out = the gradient of rope(norm(x)) along in, and each block's part of that of the weight.
void launch_rope_backward(RopeBackwardParams p, cudaStream_t stream);

}  // namespace flashbpt::sm80
