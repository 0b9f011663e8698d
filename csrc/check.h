// Checks that the host side of every op family shares. A message says what was seen and what is
// allowed; the exception types are those of scaled_dot_product_attention (RuntimeError).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "params.h"

namespace flashbpt {

inline bool is_attention_dtype(at::ScalarType t) {
  return t == at::kFloat || t == at::kBFloat16 || t == at::kHalf || t == at::kDouble;
}

// Scores, softmax and accumulators: fp64 for fp64, fp32 for the rest.
inline at::ScalarType accumulation_dtype(at::ScalarType t) {
  return t == at::kDouble ? at::kDouble : at::kFloat;
}

inline DataType data_type(at::ScalarType t) {
  switch (t) {
    case at::kDouble:
      return DataType::kFloat64;
    case at::kFloat:
      return DataType::kFloat32;
    case at::kBFloat16:
      return DataType::kBFloat16;
    case at::kHalf:
      return DataType::kFloat16;
    case at::kBool:
      return DataType::kBool;
    default:
      TORCH_CHECK(false, "flashbpt: dtype ", t,
                  " is not supported; use float32, bfloat16, "
                  "float16 or float64");
  }
}

// The CUDA kernels read and write rows whose columns lie side by side.
inline bool has_unit_columns(const at::Tensor& t) {
  return t.size(-1) <= 1 || t.stride(-1) == 1;
}

inline void check_same_device(const char* name, const at::Tensor& t, const at::Tensor& query) {
  TORCH_CHECK(t.device() == query.device(),
              "flashbpt: Expected query, key, value and all other "
              "tensors to have the same device type, but query is on ",
              query.device(), " and ", name, " on ", t.device());
}

}  // namespace flashbpt
