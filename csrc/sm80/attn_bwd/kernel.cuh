// P = exp(S - LSE)   dP = dO V^T   dS = P * (dP - delta)
// dV = P^T dO        dK = scale * dS^T Q        dQ += scale * dS K
//
// Who does what: a block owns block_k keys of one kv head, keeps K and V in shared memory and dK
// and dV in registers, and walks over the query rows that see them, of all heads of the group, in
// steps of block_q. Warps share a step in three ways: S and dP by (rows, keys), dK and dV by (keys,
// columns), dQ by (rows, columns); P and dS cross from the first to the others in shared memory.
// dQ is added to an fp32 tensor in global memory, four neighbours a lane at once; where it goes in
// two parts, the first is on its way while dK is computed.
//
// Barriers of all warps: before S (Q, dO and the rows' LSE and delta are there; nobody reads P, dS
// and the other stage of Q and dO) and before dV (P and dS are there). With two stages the copies
// of the next step have the products of this one to arrive; with one stage there is a third
// barrier, after dK (nobody reads Q and dO), and the last part of dQ = dS K hides the copies.
//
// Deterministic: blocks add to a piece of dQ in the order of their keys, each waiting for its turn.
// A block waits only for blocks before it in the grid, so those it waits for run or have ended.
//
// Slices: heads wider than the tile go in slices of dK, dV and dQ, one a block; S and dP are summed
// over pieces that pass through the tiles, the block's own last.
//
// docs/attn_bwd.md
#pragma once

#include "../../ptx/grid.h"
#include "launch.h"
#include "score_step.cuh"

namespace flashbpt::sm80 {

template <size_t kRow, bool kTf32>
using AttnBwdStep = ScoreStep<kAttnBwdKernels[kRow].config,
                              typename tile::ElementOf<kAttnBwdKernels[kRow].dtype>::Type,
                              kAttnBwdKernels[kRow].terms, kTf32>;

// kRow: the row of kAttnBwdKernels. kTf32: fp32 inputs in single TF32 products.
template <size_t kRow, bool kTf32>
struct AttnBwd : AttnBwdStep<kRow, kTf32> {
  using Step = AttnBwdStep<kRow, kTf32>;
  using Step::grad_out_smem;
  using Step::k0;
  using Step::k_smem;
  using Step::kAllTerms;
  using Step::kBias;
  using Step::kBlockK;
  using Step::kBlockQ;
  using Step::kConfig;
  using Step::kExact;
  using Step::kHeadDim;
  using Step::kMasks;
  using Step::kPrecision;
  using Step::kStages;
  using Step::kThreads;
  using Step::lane_col;
  using Step::lane_row;
  using Step::len_q;
  using Step::p;
  using Step::padded_row;
  using Step::place;
  using Step::q_smem;
  using Step::smem;
  using Step::stage;
  using Step::warp;
  using typename Step::Scores;
  using typename Step::SmemPlan;
  using typename Step::T;
  using typename Step::Tile;
  using typename Step::TileP;

  static constexpr int kMinBlocks = kConfig.min_blocks;
  // A warp's shares of dK and dV, and of dQ.
  static constexpr int kRowsKv = kBlockK / kConfig.warps_k;
  static constexpr int kColsKv = kHeadDim / (kConfig.warps / kConfig.warps_k);
  static constexpr int kRowsDq = kBlockQ / kConfig.warps_dq;
  static constexpr int kColsDq = kHeadDim / (kConfig.warps / kConfig.warps_dq);
  static constexpr int kMKv = kRowsKv / 16, kNKv = kColsKv / 8;
  static constexpr int kPartsDq = kConfig.parts_dq;
  static constexpr int kMDq = kRowsDq / 16, kNDq = kColsDq / kPartsDq / 8;
  static constexpr int kStepsQ = kBlockQ / tile::kInner<T>;
  static constexpr int kStepsK = kBlockK / tile::kInner<T>;
  using GradKv = float[kMKv][kNKv][4];

  const TileP p_smem, ds_smem;
  const int row_kv = warp % kConfig.warps_k * kRowsKv;
  const int col_kv = warp / kConfig.warps_k * kColsKv;
  const int row_dq = warp % kConfig.warps_dq * kRowsDq;
  const int col_dq = warp / kConfig.warps_dq * kColsDq;

  __device__ AttnBwd(const AttnBwdKernelParams& p, SmemPlan& smem)
      : Step(p, smem), p_smem{tile::smem_address(smem.p)}, ds_smem{tile::smem_address(smem.ds)} {}

  // ------------------------------------------------------------------------------------------ dQ

  using DqPart = float[kMDq][kNDq][4];

  // Part `part` of the columns of a step: dQ = dS K
  __device__ void multiply_dq(DqPart& dq, int part) const {
    tile::clear(dq);
    const int col = col_dq + part * kNDq * 8;
    tile::gemm<T, kPrecision, kStepsK>(dq, tile::SmemA<T, kMDq, TileP>(ds_smem, row_dq),
                                       tile::SmemTransposedB<T, kNDq, Tile, false>(k_smem, col));
  }

  // Where a part belongs, from this lane's first element on. first_row: the step's padded row.
  struct DqPlace {
    float* first;
    int pieces;  // of a row; a row has 8 elements of each piece of 16 rows
    int width;   // pieces of the part that exist
  };
  __device__ DqPlace dq_place(int part, uint32_t first_row) const {
    const int pieces = p.dq_pieces;
    const int first_piece = (slice() * kHeadDim + col_dq) / 8 + part * kNDq;
    return {p.dq_acc + uint64_t{first_row + row_dq} * (p.dq_pieces * 8) +
                (first_piece * 128 + threadIdx.x % 32 * 4),
            pieces, pieces - first_piece};
  }
  // One of `steps` shares of a part, added.
  __device__ void add_dq(const DqPart& dq, const DqPlace& at, int step, int steps) const {
    constexpr int kAll = kMDq * kNDq;
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      const int m = i % kMDq, n = i / kMDq;
      if (i >= step * kAll / steps && i < (step + 1) * kAll / steps && n < at.width)
        ptx::red_add_f32x4(at.first + (m * at.pieces + n) * 128, dq[m][n]);
    }
  }

  // Deterministic: from here on the step's rows are this block's, until end_turn().
  __device__ void begin_turn(int q_tile, uint32_t first_row) const {
    if (p.dq_turns) wait_for_turn(p.dq_turns + first_row / kTurnRows + slice(), q_tile);
  }
  __device__ void end_turn(uint32_t first_row) const {
    if (!p.dq_turns) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::add_release(p.dq_turns + first_row / kTurnRows + slice(), 1);
  }
  __device__ int slice() const { return kAllTerms ? place.slice : 0; }

  // Until all blocks with earlier keys that these rows see have added theirs.
  __device__ void wait_for_turn(const int32_t* turn, int q_tile) const {
    const int q0 = q_tile * kBlockQ, q_end = len_q < q0 + kBlockQ ? len_q : q0 + kBlockQ;
    const KeyRange seen = p.band.of_rows(q0, q_end, place.seq.shift, place.seq.len_k);
    const int earlier = k0 / kBlockK - static_cast<int>(seen.begin) / kBlockK;
    if (threadIdx.x == 0)
      while (ptx::load_acquire(turn) < earlier) {
      }
    __syncthreads();
  }

  // ---------------------------------------------------------------------------------------- steps

  __device__ void run(GradKv& dk, GradKv& dv) {
    // In turns a step must be taken even where the mask leaves it empty: others count it.
    const bool masked = kMasks && !kBias && p.mask_tiles.data != nullptr;
    const bool skips = masked && !p.dq_turns;
    const bool additive = kBias || (kAllTerms && p.mask && !masked);
    MaskWindow window;
    const auto state = [&](int head, int tile) {
      return p.mask_tiles.state<1, kBlockK / MaskTiles::kCols>(
          place.seq.batch, head, tile * kBlockQ / MaskTiles::kRows, k0 / MaskTiles::kCols, p.len_q,
          p.len_k);
    };
    const int head_end = place.head_end, tile_end = place.tile_end;
    // The first step at or after (head, tile); head_end if there is none.
    const auto next_step = [&](BwdStep step) {
      while (step.head < head_end) {
        step.tile =
            window.next(step.tile, tile_end, skips, [&](int t) { return state(step.head, t); });
        if (step.tile < tile_end) break;
        window = MaskWindow();
        step = {step.head + 1, place.tile_begin};
      }
      return step;
    };
    const auto is_partial = [&](BwdStep step) {
      return additive || (skips ? !window.full(step.tile) : masked);
    };
    const auto is_full = [&](BwdStep step) {
      return step.tile >= place.full_begin && step.tile < place.full_end;
    };
    BwdStep step{head_end - static_cast<int>(p.group_heads), place.tile_begin};
    step = next_step(step);
    if (step.head >= head_end) return;
    this->select(step);
    bool mask_partial = is_partial(step);
    const bool one_slice = !kAllTerms || p.slices.value() == 1;
    if (one_slice) {
      this->load_kv(slice());
      this->load_rows(step, slice(), stage);
    }
    this->load_terms(step, mask_partial);
    ptx::cp_async_commit();
    while (step.head < head_end) {
      // Before the wait, which hides the reads; without a mask that costs more registers than time.
      const bool full_early = kMasks && is_full(step);
      ptx::cp_async_wait<0>();
      __syncthreads();  // the step's rows are there; nobody reads P, dS and the other stage
      const bool full = kMasks ? full_early : is_full(step);
      {
        Scores s, dp;
        tile::clear(s);
        tile::clear(dp);
        if (kAllTerms) this->select(step);
        typename Step::Kept kept;
        this->scores(s, dp, kept, step, mask_partial || !full);
        this->template softmax_backward<false>(s, dp, step, mask_partial, full, kept);
        tile::store_smem<T>(s, p_smem, this->row_s + lane_row, this->col_s + lane_col);
        tile::store_smem<T>(dp, ds_smem, this->row_s + lane_row, this->col_s + lane_col);
      }
      const BwdStep next = next_step({step.head, step.tile + 1});
      const bool more = next.head < head_end;
      const bool next_partial = more && is_partial(next);
      __syncthreads();  // P and dS are there; nobody reads the rows' values and the mask
      const uint32_t first_row = padded_row;
      if (more) {
        // With terms the registers hold no pointers across products: they are found again.
        if (kAllTerms || next.head != step.head || (kMasks && next.tile != step.tile + 1))
          this->select(next);
        else
          this->select_next_tile();
        this->load_terms(next, next_partial);
        if (kStages == 2 && one_slice) this->load_rows(next, slice(), stage ^ 1);
      }
      // dV += P^T dO
      if (p.dv)
        tile::gemm<T, kPrecision, kStepsQ>(
            dv, tile::SmemTransposedA<T, kMKv, TileP>(p_smem, row_kv),
            tile::SmemTransposedB<T, kNKv, Tile>(grad_out_smem(stage), col_kv));
      const uint32_t row_dq =
          kAllTerms ? this->padded_row_of(step.head) + step.tile * kBlockQ : first_row;
      const tile::SmemTransposedA<T, kMKv, TileP> ds(ds_smem, row_kv);
      const tile::SmemTransposedB<T, kNKv, Tile> q(q_smem(stage), col_kv);
      const bool spread = kConfig.spread_dq && p.dq_acc && p.dk;
      if (kPartsDq > 1 && p.dq_acc) {
        DqPart dq;
        multiply_dq(dq, 0);
        begin_turn(step.tile, row_dq);
        const DqPlace at = dq_place(0, row_dq);
        // dK += dS^T Q, and the part of dQ is added between its steps
        if (spread)
          tile::gemm<T, kPrecision, kStepsQ>(dk, ds, q, [&](int i) { add_dq(dq, at, i, kStepsQ); });
        else
          add_dq(dq, at, 0, 1);
      }
      // dK += dS^T Q
      if (p.dk && !spread) tile::gemm<T, kPrecision, kStepsQ>(dk, ds, q);
      if (kStages == 1) {
        __syncthreads();  // nobody reads Q and dO
        if (more && one_slice) this->load_rows(next, slice(), stage);
      }
      ptx::cp_async_commit();
      if (p.dq_acc) {
        DqPart dq;
        multiply_dq(dq, kPartsDq - 1);
        if (kPartsDq == 1) begin_turn(step.tile, row_dq);
        add_dq(dq, dq_place(kPartsDq - 1, row_dq), 0, 1);
        end_turn(row_dq);
      }
      step = next;
      mask_partial = next_partial;
      if (kStages == 2 && one_slice) stage ^= 1;
    }
  }

  // scratch: a tile that nobody reads any more.
  __device__ void store(GradKv& d, const TensorView& t, int access, Tile scratch, int64_t dim,
                        float scale) const {
    if (!t) return;
#pragma unroll
    for (int m = 0; m < kMKv; ++m)
#pragma unroll
      for (int n = 0; n < kNKv; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) d[m][n][i] *= scale;
    const int64_t first = place.seq.batch * t.batch + place.kv_head * t.head +
                          (place.seq.k_begin + k0) * t.row + place.slice * kHeadDim * t.col;
    const int rows = static_cast<int>(place.seq.len_k) - k0;
    const int cols = static_cast<int>(dim) - place.slice * kHeadDim;
    const int row = row_kv + lane_row, col = col_kv + lane_col;
    float* const fp32 = static_cast<float*>(t.data) + first + row * t.row + col * t.col;
    if (p.accumulate) {
      tile::add_fp32(d, fp32, t.row, t.col, rows - row, cols - col);
    } else if constexpr (kExact) {
      tile::store_fp32(d, fp32, t.row, rows - row, cols - col, access >= 8);
    } else {
      tile::store_smem<T>(d, scratch, row, col);
      __syncthreads();
      tile::store_chunks<kBlockK, kThreads>(scratch, 0, static_cast<T*>(t.data) + first, t.row,
                                            rows, cols, access, threadIdx.x);
    }
  }
};

template <size_t kRow, bool kTf32>
__global__ void __launch_bounds__(AttnBwd<kRow, kTf32>::kThreads, AttnBwd<kRow, kTf32>::kMinBlocks)
    attn_bwd_kernel(const __grid_constant__ AttnBwdKernelParams p) {
  ptx::follow_earlier_grids();
  using Bwd = AttnBwd<kRow, kTf32>;
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Bwd::SmemPlan*>(smem_raw);
  if (threadIdx.x < 32) {
    const BwdPlace found = find_bwd_place<Bwd::kBlockQ, Bwd::kBlockK>(p, blockIdx.x);
    if (threadIdx.x == 0) Bwd::set_place(smem, p, found);
  }
  __syncthreads();
  if (smem.place.empty) return;
  Bwd bwd(p, smem);
  typename Bwd::GradKv dk, dv;
  tile::clear(dk);
  tile::clear(dv);
  bwd.run(dk, dv);
  __syncthreads();  // nobody reads K and V
  bwd.store(dk, p.dk, p.access_dk, bwd.k_smem, p.dim, static_cast<float>(p.scale));
  bwd.store(dv, p.dv, p.access_dv, bwd.v_smem, p.dim_v, 1.0f);
}

}  // namespace flashbpt::sm80
