// Accumulators on their way to global memory. A lane's accumulator [kM][kN][4] holds rows
// {0, 8} + 16 m and columns {0, 1} + 8 n from its first element on.
#pragma once

#include "../ptx/reduce.h"
#include "../ptx/shared.h"
#include "element.h"
#include "smem_tile.h"

namespace flashbpt::tile {

// fp32, as it is. out: this lane's first element; rows, cols: what is left from there; pairs: two
// neighbours are aligned to 8 bytes.
template <int kM, int kN>
__device__ void store_fp32(const float (&d)[kM][kN][4], float* out, int64_t row_stride, int rows,
                           int cols, bool pairs) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 16 * m + 8 * half;
      if (r >= rows) continue;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float (&x)[4] = d[m][n];
        float* at = out + r * row_stride + 8 * n;
        if (pairs && 8 * n + 1 < cols) {
          *reinterpret_cast<float2*>(at) = {x[2 * half], x[2 * half + 1]};
        } else {
          if (8 * n < cols) at[0] = x[2 * half];
          if (8 * n + 1 < cols) at[1] = x[2 * half + 1];
        }
      }
    }
}

// The same, added to what is there.
template <int kM, int kN>
__device__ void add_fp32(const float (&d)[kM][kN][4], float* out, int64_t row_stride,
                         int64_t col_stride, int rows, int cols) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 16 * m + i / 2 * 8, c = 8 * n + i % 2;
        if (r < rows && c < cols)
          ptx::red_add_f32(out + r * row_stride + c * col_stride, d[m][n][i]);
      }
}

// Into a tile in shared memory, in its element type. (row, col): this lane's first element there.
template <typename T, int kM, int kN, typename Tile>
__device__ void store_smem(const float (&d)[kM][kN][4], Tile to, int row, int col) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float (&x)[4] = d[m][n];
        const uint32_t at = to.at(row + 16 * m + 8 * half, (col + 8 * n) * int(sizeof(T)));
        if constexpr (sizeof(T) == 2) {
          ptx::store_shared(at, Element<T>::pack(x[2 * half], x[2 * half + 1]));
        } else {
          ptx::store_shared(at, __float_as_uint(x[2 * half]));
          ptx::store_shared(at + 4, __float_as_uint(x[2 * half + 1]));
        }
      }
}

// Rows [row, row + kRows) of a tile of 16-bit elements in shared memory, by kThreads threads of
// which this is number `thread`, as chunks where the rows in global memory are aligned. out: row 0
// of the tile; rows, cols: what there is in global memory.
template <int kRows, int kThreads, typename T, typename Tile>
__device__ void store_chunks(Tile from, int row, T* out, int64_t row_stride, int rows, int cols,
                             int access, int thread) {
  constexpr int kElements = kChunkBytes / sizeof(T);
  static_assert(kRows * Tile::kChunks % kThreads == 0);
  if (access == kChunkBytes && row + kRows <= rows && Tile::kChunks * kElements <= cols) {
#pragma unroll
    for (int first = 0; first < kRows * Tile::kChunks; first += kThreads) {
      const int i = first + thread, r = row + i / Tile::kChunks, c = i % Tile::kChunks;
      *reinterpret_cast<uint4*>(out + r * row_stride + c * kElements) =
          ptx::load_shared_16(from.chunk(r, c));
    }
    return;
  }
#pragma unroll 1
  for (int i = thread; i < kRows * Tile::kChunks; i += kThreads) {
    const int r = row + i / Tile::kChunks, c = i % Tile::kChunks;
    if (r >= rows || c * kElements >= cols) continue;
    T* at = out + r * row_stride + c * kElements;
    const uint32_t chunk_smem = from.chunk(r, c);
    if (access == kChunkBytes && (c + 1) * kElements <= cols) {
      *reinterpret_cast<uint4*>(at) = ptx::load_shared_16(chunk_smem);
      continue;
    }
#pragma unroll 1
    for (int e = 0; e < kElements && c * kElements + e < cols; ++e)
      reinterpret_cast<uint16_t*>(at)[e] =
          static_cast<uint16_t>(ptx::load_shared(chunk_smem + e / 2 * 4) >> (e % 2 * 16));
  }
}

}  // namespace flashbpt::tile
