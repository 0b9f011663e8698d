// Host -> kernel structs of merge_attention_states, CPU and CUDA alike. Free of torch headers.
#pragma once

#include <cstdint>

#include "params.h"

namespace flashbpt {

// The leading dimensions of all tensors, folded into three, outermost first; row r is their
// row-major index. One run of rows is {1, 1, rows}.
constexpr int kMergeLeadingDims = 3;

struct MergeShape {
  int64_t size[kMergeLeadingDims] = {1, 1, 1};
  int64_t rows = 0;                     // product of `size`
  int64_t dim = 0;                      // D, may be 0
  DataType dtype = DataType::kFloat32;  // of the outs; lses and sums are fp64 with fp64, else fp32
};

// One partial result. Strides count elements.
struct MergeState {
  const void* out = nullptr;  // [size 0, size 1, size 2, D], stride of D is 1
  const void* lse = nullptr;  // [size 0, size 1, size 2]
  int64_t out_stride[kMergeLeadingDims] = {};
  int64_t lse_stride[kMergeLeadingDims] = {};
};

}  // namespace flashbpt
