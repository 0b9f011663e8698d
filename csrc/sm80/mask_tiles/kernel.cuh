// tiles[b, h, i, j] = any(piece) + 2 * all(piece), piece = mask[b, h, 64 i : 64 i + 64,
//                                                               16 j : 16 j + 16]
//
// Who does what: a lane owns a tile, whose rows are 16 bytes, so that the lanes of a warp load
// neighbours; the warps of a block share the rows of the same 32 tiles. Tiles are numbered over
// the whole mask, which keeps the lanes busy where a row has fewer than 32.
//
// Barriers: one __syncthreads; after it the first warp may read what all warps saw.
//
// docs/mask_tiles.md
#pragma once

#include "../../ptx/grid.h"
#include "config.h"
#include "launch.h"

namespace flashbpt::sm80 {

struct MaskTilesParams {
  TensorView mask;
  int64_t heads, rows, cols;  // of the mask
  int64_t row_tiles, col_tiles;
  int64_t num_tiles;
  bool vectorised;  // columns are neighbours and every row starts at a multiple of 16 bytes
  uint8_t* tiles;   // [num_tiles]
};

// A byte that is not 0 counts as true, whatever it is.
struct MaskSeen {
  uint32_t any_true = 0;   // not 0: a byte was true
  uint32_t any_false = 0;  // a byte's top bit is set: a byte was false (the other bits are noise)

  __device__ void add(uint32_t word) {
    any_true |= word;
    // Borrows start at a zero byte, so the top bit of a byte is set only if this one or a lower one
    // is zero.
    any_false |= (word - 0x01010101u) & ~word;
  }
  __device__ void add(uint8_t byte) { add(byte | 0x01010100u * (byte != 0)); }
  // Bit 0: something was true; bit 1: something was false.
  __device__ uint8_t bits() const {
    return (any_true != 0) | ((any_false & 0x80808080u) != 0) << 1;
  }
};

// rows x cols elements from `from` on, of at most thread_rows x 16.
__device__ inline uint8_t see_rows(const MaskTilesParams& p, const uint8_t* from, int rows,
                                   int cols) {
  MaskSeen seen;
  if (p.vectorised && cols == MaskTiles::kCols) {
    uint4 row_reg[kMaskTilesConfig.thread_rows];
    // Past the end the last row is seen again.
#pragma unroll
    for (int i = 0; i < kMaskTilesConfig.thread_rows; ++i)
      row_reg[i] = __ldg(reinterpret_cast<const uint4*>(from + min(i, rows - 1) * p.mask.row));
#pragma unroll
    for (const uint4& row : row_reg) {
      seen.add(row.x);
      seen.add(row.y);
      seen.add(row.z);
      seen.add(row.w);
    }
  } else {
    for (int i = 0; i < rows; ++i)
#pragma unroll
      for (int j = 0; j < MaskTiles::kCols; ++j)
        seen.add(__ldg(from + i * p.mask.row + min(j, cols - 1) * p.mask.col));
  }
  return seen.bits();
}

__global__ void __launch_bounds__(kMaskTilesConfig.block_threads(), kMaskTilesConfig.min_blocks)
    mask_tiles_kernel(const __grid_constant__ MaskTilesParams p) {
  ptx::follow_earlier_grids();
  constexpr MaskTilesConfig kConfig = kMaskTilesConfig;
  __shared__ uint8_t seen_smem[kConfig.row_groups()][kConfig.block_tiles];
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  const int64_t tile = int64_t{blockIdx.x} * kConfig.block_tiles + lane;
  uint8_t seen = 0;
  if (tile < p.num_tiles) {
    const int64_t above = tile / p.col_tiles;
    const int64_t head = above / p.row_tiles;
    const int64_t row = above % p.row_tiles * MaskTiles::kRows + group * kConfig.thread_rows;
    const int64_t col = tile % p.col_tiles * MaskTiles::kCols;
    const int64_t rows = min(p.rows - row, int64_t{kConfig.thread_rows});
    const int64_t cols = min(p.cols - col, int64_t{MaskTiles::kCols});
    const uint8_t* from = static_cast<const uint8_t*>(p.mask.data) + head / p.heads * p.mask.batch +
                          head % p.heads * p.mask.head + row * p.mask.row + col * p.mask.col;
    if (rows > 0) seen = see_rows(p, from, rows, cols);
  }
  seen_smem[group][lane] = seen;
  __syncthreads();
  if (group == 0 && tile < p.num_tiles) {
#pragma unroll
    for (int i = 1; i < kConfig.row_groups(); ++i) seen |= seen_smem[i][lane];
    p.tiles[tile] = seen ^ 2;  // something was false -> all are true
  }
}

}  // namespace flashbpt::sm80
