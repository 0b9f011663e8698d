// dq = scale * dq_acc, rounded to q's type, from the order of mma fragments to rows.
//
// Who does what: a block owns kRowPad padded rows of one head. A thread takes 2 rows x 8 columns,
// rows {r, r + 8} of a piece of 16 x 8, which four lanes of the fragment hold: 64 neighbouring
// bytes. They leave as one vector a row (fp32: two). Lanes count rows first, so that 8 of them read
// one piece of 512 bytes and a warp's stores are runs of four vectors.
//
// Barriers: none. No thread reads what another one writes; nothing is shared.
//
// docs/attn_bwd_finish.md
#pragma once

#include "../../attention/find_sequence.h"
#include "../../ptx/grid.h"
#include "../../tile/vector.h"
#include "config.h"
#include "launch.h"

namespace flashbpt::sm80 {

// 8 columns of one row, cut to the `cols` that there are.
template <typename T>
__device__ void store_row(T* dq_gmem, const float (&values)[8], int cols, bool vectorised) {
  constexpr int kWidth = kAttnBwdFinishConfig.vector_bytes / sizeof(T);
  if (vectorised && cols >= 8) {
#pragma unroll
    for (int j = 0; j < 8; j += kWidth)
      *reinterpret_cast<tile::Vector<T, kWidth>*>(dq_gmem + j) =
          tile::Vector<T, kWidth>::round(values + j);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < cols) dq_gmem[j] = tile::Element<T>::from_float(values[j]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kAttnBwdFinishConfig.block_threads,
                                  kAttnBwdFinishConfig.min_blocks)
    attn_bwd_finish_kernel(const __grid_constant__ AttnBwdParams p, const bool vectorised) {
  ptx::follow_earlier_grids();
  const int64_t num_rows = padded_rows(p);
  // The same rows of all heads are neighbours where tensors come from projections.
  const unsigned heads = padded_heads(p);
  const unsigned row_block = blockIdx.x / heads, padded_head = blockIdx.x % heads;
  const SequenceTile at =
      p.packed() ? find_query_tile(p, row_block, kRowPad)
                 : SequenceTile{sequence_of(p, padded_head / p.heads_q), row_block, false};
  if (at.empty) return;
  const int64_t b = at.seq.batch, h = p.packed() ? padded_head : padded_head % p.heads_q;
  const int rows = min(at.seq.len_q - at.tile * kRowPad, kRowPad);
  const unsigned pieces = dq_acc_pieces(p.dim);
  // [kRowPad / 16, pieces, 32] fragments of one lane each
  const float4* acc_gmem = reinterpret_cast<const float4*>(p.dq_acc) +
                           (padded_head * num_rows + row_block * kRowPad) / 16 * pieces * 32;
  T* dq_gmem = static_cast<T*>(p.dq.data) + b * p.dq.batch + h * p.dq.head +
               (at.seq.q_begin + at.tile * kRowPad) * p.dq.row;
  const float scale = p.scale;
  for (unsigned i = threadIdx.x; i < kRowPad / 16 * pieces * 8; i += blockDim.x) {
    const unsigned piece = i / 8, col = piece % pieces * 8;
    const int row = piece / pieces * 16 + i % 8;
    if (row >= rows) continue;
    float low[8], high[8];  // of rows `row` and `row` + 8
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 acc = acc_gmem[i * 4 + j];
      low[2 * j] = scale * acc.x;
      low[2 * j + 1] = scale * acc.y;
      high[2 * j] = scale * acc.z;
      high[2 * j + 1] = scale * acc.w;
    }
    const int cols = p.dim - col;
    store_row(dq_gmem + row * p.dq.row + col, low, cols, vectorised);
    if (row + 8 < rows) store_row(dq_gmem + (row + 8) * p.dq.row + col, high, cols, vectorised);
  }
}

}  // namespace flashbpt::sm80
