// What the host asks of a tensor before a kernel may load its rows in vectors.
#pragma once

#include "../params.h"

namespace flashbpt::sm80 {

// Whether columns are neighbours and every row starts at a multiple of `bytes`. The stride of a
// dimension of one element means nothing.
inline bool rows_aligned(const TensorView& t, int64_t batch, int64_t heads, int64_t rows,
                         int64_t bytes) {
  const int64_t size = element_bytes(t.dtype);
  const auto fits = [&](int64_t count, int64_t stride) {
    return count <= 1 || stride * size % bytes == 0;
  };
  return t.col == 1 && reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && fits(batch, t.batch) &&
         fits(heads, t.head) && fits(rows, t.row);
}

}  // namespace flashbpt::sm80
