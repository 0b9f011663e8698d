#pragma once

#include <cuda_runtime_api.h>

#include "../../attention/divisor.h"
#include "../../paged_params.h"

namespace flashbpt::sm80 {

// New rows of one cache.
struct AppendRows {
  TensorView rows;  // [tokens, heads, width] along `row` and `head`, columns are neighbours
  CacheView cache;
  int width = 0;
  bool vectorised = false;  // 16-byte loads, and stores of as many elements
};

struct AppendKvParams {
  AppendRows key, value;
  IntegersView slots;          // [tokens], negative: none
  IntegersView positions;      // [tokens]; none: the token itself
  const float* cos = nullptr;  // [positions, half], contiguous; null: keys are not rotated
  const float* sin = nullptr;
  int half = 0;
  bool interleaved = false;
  int64_t tokens = 0;
  int heads = 0;
  int64_t page_size = 1;
};

void launch_append_kv(const AppendKvParams& p, cudaStream_t stream);

}  // namespace flashbpt::sm80
