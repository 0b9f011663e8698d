// The numbers of the mask_tiles kernel.
#pragma once

#include "../attn_params.h"

namespace flashbpt::sm80 {

struct MaskTilesConfig {
  int block_tiles;  // one a lane of a warp
  int thread_rows;  // rows of one tile a thread has under way, 16 bytes each
  int min_blocks;   // a multiprocessor holds at least so many: the register budget

  constexpr int row_groups() const { return MaskTiles::kRows / thread_rows; }
  constexpr int block_threads() const { return block_tiles * row_groups(); }
  constexpr int smem_bytes() const { return block_threads(); }
  constexpr int acc_regs() const { return thread_rows * MaskTiles::kCols / 4 + 2; }
  constexpr int reg_budget() const { return 65536 / (block_threads() * min_blocks); }
  constexpr int bytes_in_flight() const {
    return min_blocks * block_threads() * thread_rows * MaskTiles::kCols;
  }
};

// Memory-bound, 26 KB under way on a multiprocessor would do; 8 warps share a tile so that a small
// mask, too, is one trip to memory. Threads limit: 4 blocks hold half of the 2048.
//                                                   tiles rows blocks
inline constexpr MaskTilesConfig kMaskTilesConfig = {32, 8, 4};

static_assert(kMaskTilesConfig.block_tiles == 32 &&
              kMaskTilesConfig.acc_regs() + 24 <= kMaskTilesConfig.reg_budget() &&
              kMaskTilesConfig.bytes_in_flight() >= 26 * 1024);

}  // namespace flashbpt::sm80
