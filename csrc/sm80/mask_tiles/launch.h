#pragma once

#include "../attn_params.h"

namespace flashbpt::sm80 {

// mask: boolean, of sizes [batch, heads, rows, cols] as the mask itself has them (1 where it is
// broadcast), any strides. tiles: [batch, heads, ceil(rows / 64), ceil(cols / 16)], contiguous.
void launch_mask_tiles(const TensorView& mask, const int64_t (&sizes)[4], uint8_t* tiles,
                       cudaStream_t stream);

}  // namespace flashbpt::sm80
