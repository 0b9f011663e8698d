// delta = rowsum(dO * O) - dLSE        dsink = -sum_rows exp(sink - lse) delta
//
// and lse in the order in which the backward reads its rows (padded rows, attn_params.h). Rows
// without keys and rows past the end get lse = +inf and delta = 0, so that P = exp(x - lse) and dS
// vanish there without a branch, whatever dO holds. dq_acc and dq_turns of every padded row become
// zero: the main kernel adds to them.
//
// Who does what: a block owns kRowPad padded rows of one head. 4 to 32 lanes share a row, as many
// as leave a lane about two vectors of 16 bytes each of O and dO, and add up their products by
// shuffles. Then the first kRowPad threads take a row each: LSEs and results of neighbours are
// neighbours in memory. Their parts of dsink are added in an order that is always the same.
//
// Barriers: __syncthreads twice. After the first the row sums may be read; after the second (only
// with dsinks) the sums of dsink of each warp.
//
// docs/attn_bwd_prepare.md
#pragma once

#include "../../attention/find_sequence.h"
#include "../../ptx/grid.h"
#include "../../tile/vector.h"
#include "config.h"
#include "launch.h"

namespace flashbpt::sm80 {

struct AttnBwdPrepareSmem {
  float dot[kRowPad];         // rowsum(dO * O)
  float dsink[kRowPad / 32];  // of one warp's rows
};
static_assert(sizeof(AttnBwdPrepareSmem) == kAttnBwdPrepareConfig.smem_bytes());

// How rows are read: chosen by the host, the same for all rows.
struct AttnBwdPrepareRows {
  int lanes;        // of one row; a power of two
  bool vectorised;  // every row of O and dO starts at a multiple of 16 bytes, dim_v too
};

// A lane's part of the product of two rows [dim].
template <int kWidth, int kPieces, typename T>
__device__ float partial_dot(const T* a_gmem, const T* b_gmem, int dim, int lane, int lanes) {
  using Vector = tile::Vector<T, kWidth>;
  const int step = lanes * kWidth;
  float sum = 0;
  for (int first = lane * kWidth; first < dim; first += kPieces * step) {
    Vector a_reg[kPieces] = {}, b_reg[kPieces] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (first + i * step >= dim) continue;
      a_reg[i] = *reinterpret_cast<const Vector*>(a_gmem + first + i * step);
      b_reg[i] = *reinterpret_cast<const Vector*>(b_gmem + first + i * step);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum = fmaf(a_reg[i].get(j), b_reg[i].get(j), sum);
  }
  return sum;
}

// The sum over groups of `lanes` lanes, a power of two, in each of them.
__device__ inline float sum_lanes(float x, int lanes) {
  for (int other = lanes / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

__device__ inline float load_row(const TensorView& t, int64_t b, int64_t h, int64_t row) {
  return static_cast<const float*>(t.data)[b * t.batch + h * t.head + row * t.row];
}

template <typename T>
__global__ void __launch_bounds__(kAttnBwdPrepareConfig.block_threads,
                                  kAttnBwdPrepareConfig.min_blocks)
    attn_bwd_prepare_kernel(const __grid_constant__ AttnBwdParams p,
                            const AttnBwdPrepareRows split) {
  ptx::follow_earlier_grids();
  constexpr AttnBwdPrepareConfig kConfig = kAttnBwdPrepareConfig;
  constexpr int kWidth = kConfig.vector_bytes / sizeof(T);
  __shared__ AttnBwdPrepareSmem smem;
  const int64_t num_rows = padded_rows(p);
  // The same rows of all heads are neighbours where tensors come from projections.
  const unsigned heads = padded_heads(p);
  const unsigned row_block = blockIdx.x / heads, padded_head = blockIdx.x % heads;
  const SequenceTile at =
      p.packed() ? find_query_tile(p, row_block, kRowPad)
                 : SequenceTile{sequence_of(p, padded_head / p.heads_q), row_block, false};
  const int64_t b = at.seq.batch, h = p.packed() ? padded_head : padded_head % p.heads_q;
  const int64_t first_row = at.seq.q_begin + at.tile * kRowPad;
  const int rows = at.empty ? 0 : min(at.seq.len_q - at.tile * kRowPad, kRowPad);

  // Nobody waits for the zeros; the loads come behind them.
  const int64_t first_padded = padded_head * num_rows + row_block * kRowPad;
  if (p.dq_acc != nullptr) {
    const unsigned row_vectors = dq_acc_pieces(p.dim) * 2;
    float4* const acc_gmem = reinterpret_cast<float4*>(p.dq_acc) + first_padded * row_vectors;
    for (unsigned i = threadIdx.x; i < kRowPad * row_vectors; i += kConfig.block_threads)
      acc_gmem[i] = {0, 0, 0, 0};
  }
  if (p.dq_turns != nullptr && threadIdx.x < kRowPad / kTurnRows)
    p.dq_turns[first_padded / kTurnRows + threadIdx.x] = 0;

  // These need not wait for the row sums.
  const int my_row = threadIdx.x;
  float lse = -INFINITY, lse_lo = 0, grad_lse = 0;
  if (my_row < rows) {
    lse = load_row(p.lse, b, h, first_row + my_row);
    if (p.lse_lo) lse_lo = load_row(p.lse_lo, b, h, first_row + my_row);
    if (p.grad_lse) grad_lse = load_row(p.grad_lse, b, h, first_row + my_row);
  }

  const T* o_gmem = static_cast<const T*>(p.out.data) + b * p.out.batch + h * p.out.head;
  const T* do_gmem =
      static_cast<const T*>(p.grad_out.data) + b * p.grad_out.batch + h * p.grad_out.head;
  const int lane = threadIdx.x % split.lanes;
  for (int r = threadIdx.x / split.lanes; r < kRowPad; r += kConfig.block_threads / split.lanes) {
    float dot = 0;
    if (r < rows) {
      const T* o_row = o_gmem + (first_row + r) * p.out.row;
      const T* do_row = do_gmem + (first_row + r) * p.grad_out.row;
      dot = split.vectorised ? partial_dot<kWidth, kConfig.thread_vectors>(o_row, do_row, p.dim_v,
                                                                           lane, split.lanes)
                             : partial_dot<1, kWidth>(o_row, do_row, p.dim_v, lane, split.lanes);
    }
    dot = sum_lanes(dot, split.lanes);
    if (lane == 0) smem.dot[r] = dot;
  }
  __syncthreads();

  float dsink = 0;
  if (my_row < kRowPad) {
    const bool dead = lse == -INFINITY;
    const float delta = dead ? 0 : smem.dot[my_row] - grad_lse;
    const int64_t to = first_padded + my_row;
    p.row_lse[to] = dead ? INFINITY : lse;
    p.row_delta[to] = delta;
    if (p.row_lse_lo != nullptr) p.row_lse_lo[to] = dead ? 0 : lse_lo;
    if (p.dsinks && !dead) {
      const float sink = static_cast<const float*>(p.sinks.data)[h * p.sinks.head];
      dsink = -expf((sink - lse) - lse_lo) * delta;
    }
  }
  if (!p.dsinks) return;
  dsink = sum_lanes(dsink, 32);
  if (my_row < kRowPad && my_row % 32 == 0) smem.dsink[my_row / 32] = dsink;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (const float part : smem.dsink) sum += part;
    static_cast<float*>(p.dsinks.data)[row_block * p.dsinks.row +
                                       (p.packed() ? 0 : b * p.dsinks.batch) + h * p.dsinks.head] =
        sum;
  }
}

}  // namespace flashbpt::sm80
