#include "launch.h"

#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

void launch_mask_tiles(const TensorView& mask, const int64_t (&sizes)[4], uint8_t* tiles,
                       cudaStream_t stream) {
  constexpr MaskTilesConfig kConfig = kMaskTilesConfig;
  const auto [batch, heads, rows, cols] = sizes;
  const int64_t row_tiles = (rows + MaskTiles::kRows - 1) / MaskTiles::kRows;
  const int64_t col_tiles = (cols + MaskTiles::kCols - 1) / MaskTiles::kCols;
  const int64_t num_tiles = batch * heads * row_tiles * col_tiles;
  if (num_tiles == 0) return;
  const bool vectorised = rows_aligned(mask, batch, heads, rows, MaskTiles::kCols);
  const int64_t blocks = (num_tiles + kConfig.block_tiles - 1) / kConfig.block_tiles;
  const MaskTilesParams p{mask,      heads,     rows,       cols, row_tiles,
                          col_tiles, num_tiles, vectorised, tiles};
  launch_kernel<mask_tiles_kernel>(blocks, kConfig.block_threads(), 0, stream, p);
}

}  // namespace flashbpt::sm80
