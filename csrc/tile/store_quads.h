// Accumulators on their way to global memory without shared memory: the four lanes of a quad, which
// hold the same rows, exchange words until each has 16 neighbouring bytes.
#pragma once

#include "element.h"

namespace flashbpt::tile {

// Lane t of a quad ends with word t of the lanes 0 to 3.
__device__ inline uint4 transpose_quad(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? w0 : w1, 1);
  const uint32_t b = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
  if (odd) {
    w0 = a;
    w2 = b;
  } else {
    w1 = a;
    w3 = b;
  }
  const uint32_t c = __shfl_xor_sync(~0u, upper ? w0 : w2, 2);
  const uint32_t d = __shfl_xor_sync(~0u, upper ? w1 : w3, 2);
  return upper ? uint4{c, d, w2, w3} : uint4{w0, w1, c, d};
}

// d [kN][4], rows {0, 8} and columns 8 n + 2 (lane % 4) of this lane, as 16-bit elements. out: the
// lane's first row, column 0; rows, cols: what is left from there, cols in whole eights. All lanes
// of the warp take part.
template <typename T, int kN>
__device__ void store_quads(const float (&d)[kN][4], T* out, int64_t row_stride, int rows,
                            int cols) {
  static_assert(kN % 4 == 0);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < kN; n += 4) {
      const auto word = [&](int i) {
        return Element<T>::pack(d[n + i][2 * half], d[n + i][2 * half + 1]);
      };
      const uint4 eight = transpose_quad(word(0), word(1), word(2), word(3));
      const int col = 8 * (n + threadIdx.x % 4);
      if (8 * half < rows && col < cols)
        *reinterpret_cast<uint4*>(out + 8 * half * row_stride + col) = eight;
    }
}

}  // namespace flashbpt::tile
