// P = exp(S - LSE)   dP = dO V^T   dS = P * (dP - delta), after the softcap
// dmask = sum dS over whatever the mask is broadcast over
// dalibi = -sum dS * |q + shift - k| over the queries and keys of a head
//
// Who does what: a block owns a piece of the gradient, block_q queries x block_k keys of one batch
// element and head, of which each may be broadcast, and visits every tile of scores that the piece
// is added to. Tiles outside of the band are passed over by index arithmetic, those that a boolean
// mask leaves empty too. Warps share a tile by rows and keys; dS adds up in their registers, and
// what the term is broadcast over within a tile is summed at the end, through shared memory.
// Sums have one order, unless the host lets several blocks share the visits of a piece.
//
// Barriers of all warps: before the copies of a tile (nobody reads the former one) and after them;
// two around the place of a visit; at the end, between the sums of the warps and those of threads.
//
// docs/attn_bwd_terms.md
#pragma once

#include "../../ptx/grid.h"
#include "../attn_bwd/score_step.cuh"
#include "launch.h"
#include "schedule.h"

namespace flashbpt::sm80 {

template <size_t kRow, bool kTf32>
using AttnBwdTermsStep =
    ScoreStep<kAttnBwdTermsKernels[kRow].config,
              typename tile::ElementOf<kAttnBwdTermsKernels[kRow].dtype>::Type, Terms::kAll, kTf32>;

// kRow: the row of kAttnBwdTermsKernels. kTf32: fp32 inputs in single TF32 products.
template <size_t kRow, bool kTf32>
struct AttnBwdTerms : AttnBwdTermsStep<kRow, kTf32> {
  using Step = AttnBwdTermsStep<kRow, kTf32>;
  using Step::col_s;
  using Step::k0;
  using Step::kBlockK;
  using Step::kBlockQ;
  using Step::kM;
  using Step::kN;
  using Step::lane_col;
  using Step::lane_row;
  using Step::len_q;
  using Step::place;
  using Step::row_s;
  using Step::smem;
  using typename Step::Scores;
  using typename Step::SmemPlan;

  static constexpr int kThreads = Step::kThreads;
  static constexpr int kMinBlocks = Step::kConfig.min_blocks;
  static_assert(kThreads >= kBlockQ && kThreads >= kBlockK);

  const AttnBwdTermsKernelParams& p;
  // P and dS do not pass through shared memory here. Their place holds what the block owns, since
  // the loops need the registers, and the sum when nobody reads that any more.
  const TermsBlock& block;
  float (&sum_smem)[kBlockQ][kBlockK];

  __device__ AttnBwdTerms(const AttnBwdTermsKernelParams& p, SmemPlan& smem)
      : Step(p, smem),
        p(p),
        block(reinterpret_cast<TermsBlock&>(smem.p)),
        sum_smem(reinterpret_cast<float (&)[kBlockQ][kBlockK]>(smem.p)) {}

  // All visits; false where there is nothing to add.
  __device__ bool run(Scores& sum) {
    bool any = false;
    for (uint32_t visit = block.visit_begin; visit < block.visit_end; ++visit) {
      __syncthreads();  // nobody reads the former place
      if (threadIdx.x < 32) {
        const BwdPlace found = find_terms_place<kBlockQ, kBlockK>(p, block, visit);
        if (threadIdx.x == 0) Step::set_place(smem, p, found);
      }
      __syncthreads();
      if (!place.empty) any |= walk(sum);
    }
    return any;
  }

  // The query tiles of a visit.
  __device__ bool walk(Scores& sum) {
    k0 = place.k0;
    len_q = static_cast<int>(place.seq.len_q);
    const int head = place.head_end - 1;
    const bool masked = p.mask_tiles.data != nullptr;
    const bool additive = p.mask && !masked;
    MaskWindow window;
    const auto next = [&](int tile) {
      return window.next(tile, place.tile_end, masked, [&](int t) {
        return p.mask_tiles.state<1, kBlockK / MaskTiles::kCols>(
            place.seq.batch, head, t * kBlockQ / MaskTiles::kRows, k0 / MaskTiles::kCols, p.len_q,
            p.len_k);
      });
    };
    bool loaded = false, any = false;
    for (int tile = next(place.tile_begin); tile < place.tile_end; tile = next(tile + 1)) {
      const BwdStep step{head, tile};
      const bool mask_partial = additive || (masked && !window.full(tile));
      const bool full = tile >= place.full_begin && tile < place.full_end;
      typename Step::Kept kept;
      Scores s, dp;
      tile::clear(s);
      tile::clear(dp);
      // S += Q K^T, dP += dO V^T
      const int slices = p.slices.value();
      for (int slice = slices - 1; slice >= 0; --slice) {
        __syncthreads();  // nobody reads the former tile
        if (!loaded) this->load_kv(slice);
        this->select(step);  // here: the registers hold no pointers across products
        this->load_rows(step, slice, 0);
        if (slice == slices - 1) this->load_terms(step, mask_partial);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (mask_partial || !full) this->clear_dead_rows(step);
        if (slice == 0)
          this->add_last_scores(s, dp, kept, step);
        else
          this->add_scores(s, dp, tile::Nothing());
      }
      this->template softmax_backward<true>(s, dp, step, mask_partial, full, kept);
      add(sum, dp, tile);
      loaded = slices == 1;
      any = true;
    }
    return any;
  }

  // sum += dS, times its derivative by the slope where that is asked for. What a row does not see
  // is passed over, since the products may be NaN there.
  __device__ void add(Scores& sum, Scores& ds, int tile) const {
    const int row_tile = row_s + lane_row, row = tile * kBlockQ + row_tile;
    const int col = k0 + col_s + lane_col;
    const Sequence& seq = place.seq;
    if (p.of_alibi) {
      const float from_first = static_cast<float>(row + seq.shift - col);
      ScoreTerms::for_each(
          ds, [&](float& x, int r, int c) { x *= -ScoreTerms::distance(from_first, r, c); });
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = 16 * m + 8 * half;
        const KeyRange keys = p.band.of_row(row + r, seq.shift, seq.len_k);
        const int begin = static_cast<int>(keys.begin) - col;
        const bool dead = smem.lse[row_tile + r] == INFINITY;
        const int end = dead ? begin : static_cast<int>(keys.end) - col;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int c = 8 * n + i;
            if (c >= begin && c < end) sum[m][n][2 * half + i] += ds[m][n][2 * half + i];
          }
      }
  }

  __device__ void put(float* out, float x) const {
    if (p.splits > 1)
      ptx::red_add_f32(out, x);
    else
      *out = x;
  }

  // After the visits: each of them has the piece's place in the gradient.
  __device__ void store(const Scores& sum) const {
    const TensorView& grad = p.grad;
    float* const out = static_cast<float*>(grad.data) + place.seq.batch * grad.batch +
                       (place.head_end - 1) * grad.head + int64_t{block.row} * kBlockQ * grad.row +
                       place.k0 * grad.col + block.col * p.partial_stride;
    const int rows = static_cast<int>(place.seq.len_q - int64_t{block.row} * kBlockQ);
    const int cols = static_cast<int>(place.seq.len_k) - place.k0;
    const int r = row_s + lane_row, c = col_s + lane_col;
    if (grad.row != 0 && grad.col != 0) {
      float* const first = out + r * grad.row + c;
      if (p.splits > 1)
        tile::add_fp32(sum, first, grad.row, 1, rows - r, cols - c);
      else
        tile::store_fp32(sum, first, grad.row, rows - r, cols - c, p.grad_pairs);
      return;
    }
    __syncthreads();  // nobody reads `block`
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sum_smem[r + 16 * m + i / 2 * 8][c + 8 * n + i % 2] = sum[m][n][i];
    __syncthreads();  // the sum is there
    const int i = threadIdx.x;
    float total = 0.0f;
    if (grad.row != 0) {
      if (i >= kBlockQ || i >= rows) return;
      // A row a thread; each starts at another bank.
      for (int j = 0; j < kBlockK; ++j) total += sum_smem[i][(i + j) % kBlockK];
      return put(out + i * grad.row, total);
    }
    if (i < kBlockK)
      for (int j = 0; j < kBlockQ; ++j) total += sum_smem[j][i];
    if (grad.col != 0) {
      if (i < kBlockK && i < cols) put(out + i, total);
      return;
    }
    if (i < kBlockK) sum_smem[0][i] = total;  // the column is this thread's
    __syncthreads();                          // the sums of the columns are there
    if (i != 0) return;
    total = 0.0f;
    for (int j = 0; j < kBlockK; ++j) total += sum_smem[0][j];
    put(out, total);
  }
};

template <size_t kRow, bool kTf32>
__global__ void __launch_bounds__(AttnBwdTerms<kRow, kTf32>::kThreads,
                                  AttnBwdTerms<kRow, kTf32>::kMinBlocks)
    attn_bwd_terms_kernel(const __grid_constant__ AttnBwdTermsKernelParams p) {
  ptx::follow_earlier_grids();
  using Terms = AttnBwdTerms<kRow, kTf32>;
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Terms::SmemPlan*>(smem_raw);
  if (threadIdx.x == 0) reinterpret_cast<TermsBlock&>(smem.p) = find_terms_block(p, blockIdx.x);
  __syncthreads();
  Terms terms(p, smem);
  typename Terms::Scores sum;
  tile::clear(sum);
  if (terms.run(sum)) terms.store(sum);
}

}  // namespace flashbpt::sm80
