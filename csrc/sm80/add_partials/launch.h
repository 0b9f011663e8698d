#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashbpt::sm80 {

// totals[i] [width] += the sum over the rows of partials[i] [count, width]; null totals: skipped.
struct AddPartialsParams {
  const float* partials[2] = {};
  float* totals[2] = {};
  int64_t count = 0;
  int width = 0;
};

void launch_add_partials(const AddPartialsParams& p, cudaStream_t stream);

}  // namespace flashbpt::sm80
