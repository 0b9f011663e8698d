// Accumulators on their way to global memory without shared memory: neighbouring lanes exchange
// words until each has 8 neighbouring bytes, and a row of a warp's store fills whole sectors.
#pragma once

#include "element.h"

namespace flashbpt::tile {

// d [kN][4], rows {0, 8} and columns 8 n + 2 (lane % 4) of this lane, as 16-bit elements. out: the
// lane's first row, column 0; rows, cols: what is left from there, cols in whole eights. All lanes
// of the warp take part.
template <typename T, int kN>
__device__ void store_pairs(const float (&d)[kN][4], T* out, int64_t row_stride, int rows,
                            int cols) {
  static_assert(kN % 2 == 0);
  // An odd lane takes the second eight columns of sixteen, its neighbour the first.
  const int odd = threadIdx.x & 1;
  T* const lane_out = out + 8 * odd + 2 * (threadIdx.x & 2);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      const uint32_t first = Element<T>::pack(d[n][2 * half], d[n][2 * half + 1]);
      const uint32_t second = Element<T>::pack(d[n + 1][2 * half], d[n + 1][2 * half + 1]);
      const uint32_t other = __shfl_xor_sync(~0u, odd ? first : second, 1);
      if (8 * half < rows && 8 * (n + odd) < cols)
        *reinterpret_cast<uint2*>(lane_out + 8 * half * row_stride + 8 * n) =
            odd ? uint2{other, second} : uint2{first, other};
    }
}

}  // namespace flashbpt::tile
