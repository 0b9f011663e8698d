#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"

namespace flashbpt::sm80 {

// Rows are contiguous, [rows, width].
struct RowNormParams {
  const void* x = nullptr;
  const void* weight = nullptr;  // [width]; null: ones
  const void* bias = nullptr;    // [width]; null: zeros
  void* out = nullptr;
  int64_t rows = 0;
  int width = 0;
  float eps = 0;
  bool centred = false;  // LayerNorm; else RMSNorm, whose mean is 0
  DataType dtype = DataType::kFloat32;
  bool vectorised = false;  // set by the launch: whole vectors of 16 bytes, and rows fit
};

// out = norm(x)
void launch_row_norm(RowNormParams p, cudaStream_t stream);

struct RowNormBackwardParams : RowNormParams {  // out: dx, which may be dy, x or residual
  const void* dy = nullptr;
  const void* residual = nullptr;  // null: none
  // Of each block [blocks, width], 16-byte aligned; null where not needed.
  float* weight_partials = nullptr;
  float* bias_partials = nullptr;
  int blocks = 0;  // row_norm_blocks()
};

// Blocks of the backward on a GPU with so many multiprocessors.
int row_norm_blocks(const RowNormParams& p, int multiprocessors);

// dx = residual + the gradient of norm(x) along dy, and each block's part of those of weight and
// bias.
void launch_row_norm_backward(RowNormBackwardParams p, cudaStream_t stream);

}  // namespace flashbpt::sm80
