#pragma once

#include <cuda_runtime_api.h>

#include "../../attention/divisor.h"
#include "../../params.h"

namespace flashbpt::sm80 {

// Rows are contiguous, [rows, width]; out may be x or residual.
struct RowDropoutParams {
  const void* x = nullptr;
  const void* bias = nullptr;      // [width]; null: none
  const void* residual = nullptr;  // null: none
  void* out = nullptr;
  int64_t rows = 0;
  int width = 0;
  DataType dtype = DataType::kFloat32;

  // Null: no dropout. Word column % 4 of Philox counter (offset + 4 * site, 0, token + row,
  // column / 4) belongs to an element, which stays where word >= threshold.
  const int64_t* rng_state = nullptr;  // [2]: seed, offset
  uint32_t site = 0;
  uint32_t token = 0;
  uint64_t threshold = 0;  // 2^32 and more: nothing stays
  float scale = 1.0f;      // of what stays

  // Set by the launch.
  Divisor pieces;  // threads of a row
  bool vectorised = false;
};

// out = residual + dropout(x + bias)
void launch_row_dropout(RowDropoutParams p, cudaStream_t stream);

}  // namespace flashbpt::sm80
