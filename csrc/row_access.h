// How the rows of a tensor lie in memory: by how many bytes they can be copied.
#pragma once

#include "params.h"

namespace flashbpt {

// The largest of 16, 8, 4, 2 and 1 that divides all numbers that were or-ed together.
inline int common_access(uint64_t bits) {
  bits |= 16;
  return static_cast<int>(bits & (~bits + 1));  // the lowest bit that is set
}

// 16, 8, 4, 2 or 1; strides of dimensions of size 1 do not matter.
inline int row_access(const TensorView& t, int64_t batch, int64_t heads, int64_t rows) {
  const uint64_t bytes = element_bytes(t.dtype);
  uint64_t bits = reinterpret_cast<uint64_t>(t.data);
  if (batch > 1) bits |= static_cast<uint64_t>(t.batch) * bytes;
  if (heads > 1) bits |= static_cast<uint64_t>(t.head) * bytes;
  if (rows > 1) bits |= static_cast<uint64_t>(t.row) * bytes;
  return common_access(bits);
}

// Whether columns are neighbours and every row starts at a multiple of `bytes`.
inline bool rows_aligned(const TensorView& t, int64_t batch, int64_t heads, int64_t rows,
                         int64_t bytes) {
  return t.col == 1 && row_access(t, batch, heads, rows) >= bytes;
}

}  // namespace flashbpt
