// A mask under a lane's fragment of scores: a boolean one from global memory, which only tiles look
// at that it is partly false in; an additive one from shared memory, where the copy engine has put
// it.
#pragma once

#include <cmath>

#include "../params.h"
#include "../ptx/prefetch.h"
#include "../ptx/shared.h"
#include "../row_access.h"
#include "../tile/element.h"

namespace flashbpt {

// Whether a lane can read two neighbouring elements of every row of a boolean mask at once.
inline bool boolean_mask_has_pairs(const AttentionParams& p) {
  return p.len_k % 2 == 0 && rows_aligned(p.mask, p.batch, p.heads_q, p.len_q, 2);
}

// Part of a boolean mask that has pairs, from some element on.
struct BooleanMaskPart {
  const uint8_t* first;
  int64_t row_stride;
  int rows, cols;  // what there is

  __device__ BooleanMaskPart(const TensorView& mask, int batch, int head, int row, int col,
                             int rows, int cols)
      : first(static_cast<const uint8_t*>(mask.data) + batch * mask.batch + head * mask.head +
              row * mask.row + col),
        row_stride(mask.row),
        rows(rows),
        cols(cols) {}

  // Brings kCols columns of row `row` near.
  template <int kCols>
  __device__ void prefetch(int row) const {
    if (row >= rows) return;
    ptx::prefetch_l1(first + row * row_stride);
    ptx::prefetch_l1(first + row * row_stride + min(cols, kCols) - 1);
  }

  // Scores of rows {0, 8} and columns {0, 1} + 8 n become -inf where it is false.
  template <int kN>
  __device__ void apply(float (&s)[kN][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (8 * half >= rows) continue;
      const uint8_t* const row = first + 8 * half * row_stride;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (8 * n >= cols) continue;
        const uint16_t pair = *reinterpret_cast<const uint16_t*>(row + 8 * n);
        if ((pair & 0xffu) == 0) s[n][2 * half] = -INFINITY;
        if ((pair & 0xff00u) == 0) s[n][2 * half + 1] = -INFINITY;
      }
    }
  }
};

// Scores times factor, plus a bias of type T in a tile of shared memory (tile/wgmma_operand.h).
// tile_smem: the tile; row, col: the lane's first element, col below 8.
template <typename T, typename Tile, int kN>
__device__ void add_bias(float (&s)[kN][4], float factor, uint32_t tile_smem, int row, int col) {
  const uint32_t lane = tile_smem + row * Tile::kRowBytes + (row % 8 * 16 + col * 2);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      // Rows 8 apart are swizzled alike.
      const uint32_t word = ptx::load_shared((lane ^ (n % 8 * 16)) + n / 8 * Tile::kChunkBytes +
                                             8 * half * Tile::kRowBytes);
      const float2 bias = tile::Element<T>::unpack(word);
      s[n][2 * half] = fmaf(s[n][2 * half], factor, bias.x);
      s[n][2 * half + 1] = fmaf(s[n][2 * half + 1], factor, bias.y);
    }
}

}  // namespace flashbpt
