// A mask under a lane's fragment of scores, read from global memory.
#pragma once

#include <cmath>

#include "../params.h"
#include "../ptx/prefetch.h"
#include "../row_access.h"
#include "../tile/element.h"

namespace flashbpt {

// Whether a lane can read two neighbouring elements of every row at once: booleans, or 16 bits.
inline bool mask_has_pairs(const AttentionParams& p) {
  return p.mask.dtype != DataType::kFloat32 && p.mask.col == 1 && p.len_k % 2 == 0 &&
         row_access(p.mask, p.batch, p.heads_q, p.len_q) >= 2 * element_bytes(p.mask.dtype);
}

// Part of a mask that has pairs, from some element on.
struct MaskPart {
  const TensorView& mask;
  int64_t first;   // element
  int rows, cols;  // what there is from there

  __device__ MaskPart(const AttentionParams& p, int batch, int head, int row, int col, int rows,
                      int cols)
      : mask(p.mask),
        first(batch * p.mask.batch + head * p.mask.head + row * p.mask.row + col),
        rows(rows),
        cols(cols) {}

  // Brings the lines of kCols columns of row `row` near, a share of them for each of kShares lanes.
  template <int kCols, int kShares>
  __device__ void prefetch(int row, int share) const {
    constexpr int kLine = 128;
    const int bytes = element_bytes(mask.dtype), end = min(cols, kCols) * bytes;
    const char* const from = static_cast<const char*>(mask.data) + (first + row * mask.row) * bytes;
    for (int at = share * kLine; row < rows && at < end; at += kShares * kLine)
      ptx::prefetch_l1(from + at);
  }

  // Under rows {0, 8} and columns {0, 1} + 8 n: scores become -inf where a boolean mask is false;
  // others, of type T, are added to scores times factor.
  template <typename T, int kN>
  __device__ void apply(float (&s)[1][kN][4], float factor) const {
    if (mask.dtype == DataType::kBool) {
      for_each<uint16_t, kN>([&](int n, int half, uint16_t pair) {
        if ((pair & 0xffu) == 0) s[0][n][2 * half] = -INFINITY;
        if ((pair & 0xff00u) == 0) s[0][n][2 * half + 1] = -INFINITY;
      });
    } else {
      for_each<uint32_t, kN>([&](int n, int half, uint32_t pair) {
        const float2 bias = tile::Element<T>::unpack(pair);
        s[0][n][2 * half] = fmaf(s[0][n][2 * half], factor, bias.x);
        s[0][n][2 * half + 1] = fmaf(s[0][n][2 * half + 1], factor, bias.y);
      });
    }
  }

 private:
  // f(n, half, pair) of the pairs that there are.
  template <typename Pair, int kN, typename F>
  __device__ void for_each(F f) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (8 * half >= rows) continue;
      const char* const from = static_cast<const char*>(mask.data) +
                               (first + 8 * half * mask.row) * int64_t{sizeof(Pair) / 2};
#pragma unroll
      for (int n = 0; n < kN; ++n)
        if (8 * n < cols)
          f(n, half, *reinterpret_cast<const Pair*>(from + 8 * n * (sizeof(Pair) / 2)));
    }
  }
};

}  // namespace flashbpt
