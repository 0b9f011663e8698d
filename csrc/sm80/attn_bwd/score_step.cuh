// The part of the backward that two kernels share: copies of a step, S and dP, P and dS.
//
// P = exp(S - LSE)   dP = dO V^T   dS = P * (dP - delta)
#pragma once

#include "../../attention/dropout.h"
#include "../../attention/mask_stage.h"
#include "../../tile/copy.h"
#include "../../tile/gemm.h"
#include "../../tile/store.h"
#include "schedule.h"

namespace flashbpt::sm80 {

// A step is one tile of query rows of one head against one tile of keys. Warps share it by rows and
// columns.
template <AttnBwdConfig kConfigArg, typename TArg, Terms kTerms, bool kTf32>
struct ScoreStep {
  static constexpr AttnBwdConfig kConfig = kConfigArg;
  static constexpr bool kMasks = kTerms != Terms::kNone;
  static constexpr bool kAllTerms = kTerms == Terms::kAll;
  static constexpr bool kBias = kTerms == Terms::kBias;  // then there is one
  static constexpr bool kDrops = kTerms == Terms::kDropout || kAllTerms;
  using T = TArg;

  static constexpr int kBlockQ = kConfig.block_q;
  static constexpr int kBlockK = kConfig.block_k;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kStages = kConfig.stages;
  static constexpr bool kExact = sizeof(T) == 4;
  static_assert(!kConfig.interleave || !kExact, "fp32 has no product of a single step");
  static constexpr tile::Precision kPrecision =
      kTf32 ? tile::Precision::kTf32 : tile::Precision::k3xTf32;

  // A warp's share of S and dP.
  static constexpr int kRowsS = kBlockQ / kConfig.warps_q;
  static constexpr int kColsS = kBlockK / (kConfig.warps / kConfig.warps_q);
  static constexpr int kM = kRowsS / 16, kN = kColsS / 8;
  static constexpr int kStepsDim = kHeadDim / tile::kInner<T>;

  using Tile = tile::SmemTile<kConfig.row_bytes()>;
  using TileP = tile::SmemTile<kBlockK * sizeof(T)>;
  using Mask =
      MaskStage<kBlockQ, kBlockK, kThreads,
                kAllTerms ? MaskKind::kAny : (kBias ? MaskKind::kAdditive : MaskKind::kBoolean)>;
  using Scores = float[kM][kN][4];
  using Kept = KeptBits<kM, kN>;

  struct SmemPlan {
    alignas(1024) char k[kBlockK][kConfig.row_bytes()];
    char v[kBlockK][kConfig.row_bytes()];
    char q[kStages][kBlockQ][kConfig.row_bytes()];
    char grad_out[kStages][kBlockQ][kConfig.row_bytes()];
    char p[kBlockQ][kBlockK * sizeof(T)];  // [q, k], with dropout
    char ds[kBlockQ][kBlockK * sizeof(T)];
    float lse[kBlockQ];
    float delta[kBlockQ];
    float lse_lo[kBlockQ];
    BwdPlace place;  // here, since the loop needs the registers
    Dropout dropout;
    char padding[AttnBwdConfig::kPlaceBytes - sizeof(BwdPlace) - sizeof(Dropout)];
    char mask[];  // [kBlockQ, kBlockK] of the mask's own type, rows padded
  };

  const AttnBwdKernelParams& p;
  SmemPlan& smem;
  const BwdPlace& place;
  const Tile k_smem, v_smem;
  // Copies in registers of what every step needs from `place`.
  int k0, len_q;
  int stage = 0;  // of the current step
  // Of the step that is copied next: its first row, and this thread's first chunks of Q and dO.
  uint32_t padded_row;
  uint32_t q_chunk, grad_out_chunk;  // where rows are whole
  Mask mask;
  const tile::CopyShare<kBlockQ, kThreads, Tile> share;
  const int warp = threadIdx.x / 32;
  const int lane_row = threadIdx.x % 32 / 4;
  const int lane_col = threadIdx.x % 4 * 2;
  const int row_s = warp % kConfig.warps_q * kRowsS;
  const int col_s = warp / kConfig.warps_q * kColsS;

  __device__ ScoreStep(const AttnBwdKernelParams& p, SmemPlan& smem)
      : p(p),
        smem(smem),
        place(smem.place),
        k_smem{tile::smem_address(smem.k)},
        v_smem{tile::smem_address(smem.v)},
        k0(smem.place.k0),
        len_q(static_cast<int>(smem.place.seq.len_q)),
        mask(p.mask, p.access.mask, tile::smem_address(smem.mask)) {}

  // By one thread.
  static __device__ void set_place(SmemPlan& smem, const AttnBwdKernelParams& p,
                                   const BwdPlace& found) {
    smem.place = found;
    if (kDrops && p.dropout_threshold > 0) smem.dropout = Dropout(p, found.seq);
  }

  __device__ Tile q_smem(int stage) const { return {tile::smem_address(smem.q[stage])}; }
  __device__ Tile grad_out_smem(int stage) const {
    return {tile::smem_address(smem.grad_out[stage])};
  }

  // ------------------------------------------------------------------------------------- copies

  // From (head, row) on, first column.
  __device__ const char* rows_gmem(const TensorView& t, int64_t head, int64_t row) const {
    return reinterpret_cast<const char*>(static_cast<const T*>(t.data) + place.seq.batch * t.batch +
                                         head * t.head + row * t.row);
  }
  static __device__ int slice_bytes(int slice) { return slice * kHeadDim * int(sizeof(T)); }
  static __device__ int row_bytes_from(int64_t dim, int slice) {
    return static_cast<int>(dim) * int(sizeof(T)) - slice_bytes(slice);
  }
  // first: row 0 of the tile, first column of all.
  template <int kRows>
  static __device__ void load_rows_of(Tile to, const TensorView& t, int access, int64_t dim,
                                      const char* first, int rows, int slice) {
    tile::load_tile<kRows, kThreads>(
        to, {first + slice_bytes(slice), t.row * int64_t{sizeof(T)}, access}, rows,
        row_bytes_from(dim, slice));
  }
  __device__ void load_kv(int slice) const {
    const int64_t row = place.seq.k_begin + k0;
    const int rows = static_cast<int>(place.seq.len_k) - k0;
    load_rows_of<kBlockK>(k_smem, p.k, p.access.k, p.dim, rows_gmem(p.k, place.kv_head, row), rows,
                          slice);
    load_rows_of<kBlockK>(v_smem, p.v, p.access.v, p.dim_v, rows_gmem(p.v, place.kv_head, row),
                          rows, slice);
  }
  // First padded row of the sequence, of a head.
  __device__ uint32_t padded_row_of(int head) const {
    return static_cast<uint32_t>(padded_head(p, place.seq.batch, head) * padded_rows(p) +
                                 place.padded_begin);
  }
  // The step that is copied next.
  __device__ void select(BwdStep step) {
    padded_row = padded_row_of(step.head) + step.tile * kBlockQ;
    if (kAllTerms || !p.whole_rows) return;
    const auto first_chunk = [&](const TensorView& t) {
      const int64_t row = place.seq.q_begin + step.tile * kBlockQ + share.row;
      const int64_t at = place.seq.batch * t.batch + step.head * t.head + row * t.row;
      return static_cast<uint32_t>(at * int{sizeof(T)} / tile::kChunkBytes) + share.chunk;
    };
    q_chunk = first_chunk(p.q);
    grad_out_chunk = first_chunk(p.grad_out);
  }
  // From the selected step to the next tile of the head.
  __device__ void select_next_tile() {
    padded_row += kBlockQ;
    q_chunk += kBlockQ * p.q_row_chunks;
    grad_out_chunk += kBlockQ * p.grad_out_row_chunks;
  }
  // Q and dO of the selected step.
  __device__ void load_rows(BwdStep step, int slice, int to_stage) const {
    const int q0 = step.tile * kBlockQ, rows = len_q - q0;
    if (!kAllTerms && p.whole_rows && rows >= kBlockQ) {
      tile::load_whole_tile<kBlockQ, kThreads>(q_smem(to_stage), p.q.data, q_chunk, p.q_row_chunks);
      tile::load_whole_tile<kBlockQ, kThreads>(grad_out_smem(to_stage), p.grad_out.data,
                                               grad_out_chunk, p.grad_out_row_chunks);
    } else {
      const int64_t row = place.seq.q_begin + q0;
      load_rows_of<kBlockQ>(q_smem(to_stage), p.q, p.access.q, p.dim,
                            rows_gmem(p.q, step.head, row), rows, slice);
      load_rows_of<kBlockQ>(grad_out_smem(to_stage), p.grad_out, p.access_grad_out, p.dim_v,
                            rows_gmem(p.grad_out, step.head, row), rows, slice);
    }
  }
  // LSE and delta of the selected step.
  __device__ void load_row_values() const {
    constexpr int kChunks = kBlockQ / 4;
    const auto load = [&](float* to, const float* from, int first_thread) {
      const int i = static_cast<int>(threadIdx.x) - first_thread;
      if (i >= 0 && i < kChunks)
        ptx::cp_async_16(tile::smem_address(to + 4 * i), from + padded_row + 4 * i);
    };
    load(smem.lse, p.row_lse, 0);
    load(smem.delta, p.row_delta, kChunks);
    if ((kAllTerms || kBias) && p.row_lse_lo) load(smem.lse_lo, p.row_lse_lo, 2 * kChunks);
  }
  // What the softmax of a step needs beside Q and dO.
  __device__ void load_terms(BwdStep step, bool mask_partial) {
    load_row_values();
    if (kMasks && mask_partial) {
      const int q0 = step.tile * kBlockQ;
      mask.load(place.seq.batch, step.head, q0, k0, len_q - q0,
                static_cast<int>(place.seq.len_k) - k0);
    }
  }

  // ------------------------------------------------------------------------------------ products

  // S += Q K^T, dP += dO V^T, over all slices, and what dropout keeps. hides: some row does not see
  // some key.
  __device__ void scores(Scores& s, Scores& dp, Kept& kept, BwdStep step, bool hides) const {
    if constexpr (kAllTerms) {
      const int slices = p.slices.value();
      for (int i = 1; slices > 1 && i <= slices; ++i) {
        __syncthreads();  // nobody reads the former slice
        const int slice = (place.slice + i) % slices;
        load_kv(slice);
        load_rows(step, slice, stage);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (i == slices) break;
        if (hides) clear_dead_rows(step);
        add_scores(s, dp, tile::Nothing());
      }
    }
    if (hides) clear_dead_rows(step);
    add_last_scores(s, dp, kept, step);
  }
  // The last slice's, and meanwhile what dropout keeps.
  __device__ void add_last_scores(Scores& s, Scores& dp, Kept& kept, BwdStep step) const {
    if (kDrops && p.dropout_threshold > 0) {
      const DropoutTile<kM, kN> draws(
          smem.dropout, step.head, step.tile * kBlockQ + row_s + lane_row, k0 + col_s + lane_col);
      add_scores(s, dp, [&](int i) { draws.draw_share(kept, i, kStepsDim); });
    } else {
      add_scores(s, dp, tile::Nothing());
    }
  }
  // each_step: work to be done between the steps of Q K^T.
  template <typename EachStep>
  __device__ void add_scores(Scores& s, Scores& dp, EachStep each_step) const {
    const tile::SmemA<T, kM, Tile> q(q_smem(stage), row_s), grad_out(grad_out_smem(stage), row_s);
    const tile::SmemB<T, kN, Tile> k(k_smem, col_s), v(v_smem, col_s);
    if (kConfig.interleave && needs_ds()) {
#pragma unroll
      for (int step = 0; step < kStepsDim; ++step) {
        tile::gemm_step<T>(s, q, k, step);
        tile::gemm_step<T>(dp, grad_out, v, step);
        each_step(step);
      }
    } else {
      tile::gemm<T, kPrecision, kStepsDim>(s, q, k, each_step);
      // The branch keeps the compiler from mixing the two.
      if (needs_ds()) tile::gemm<T, kPrecision, kStepsDim>(dp, grad_out, v);
    }
  }
  // dV alone needs P alone.
  __device__ bool needs_ds() const { return p.needs_ds; }
  // What arrives for a row without keys may be NaN; its P is 0, and so is all that it gives. Only
  // tiles that are hidden in part have such rows. (A row whose products are all -inf has keys.)
  __device__ void clear_dead_rows(BwdStep step) const {
    const int rows = len_q - step.tile * kBlockQ;
    bool dead = false;
    for (int r = threadIdx.x % 32; r < kBlockQ && r < rows; r += 32)
      dead |= smem.lse[r] == INFINITY;
    if (!__any_sync(0xffffffffu, dead)) return;  // the same in all warps
    for (int i = threadIdx.x; i < kBlockQ * Tile::kChunks; i += kThreads)
      if (smem.lse[i / Tile::kChunks] == INFINITY)
        ptx::store_shared_16(grad_out_smem(stage).chunk(i / Tile::kChunks, i % Tile::kChunks),
                             {0, 0, 0, 0});
    __syncthreads();
  }

  // ------------------------------------------------------------------------------- probabilities

  // s: products become P as dV takes it; dp becomes dS, the gradient of the product before scale
  // or, with kOfTerms, of what is added to the scores after the softcap.
  template <bool kOfTerms = false>
  __device__ void softmax_backward(Scores& s, Scores& dp, BwdStep step, bool mask_partial,
                                   bool full, const Kept& kept) const {
    const int row_tile = row_s + lane_row, row = step.tile * kBlockQ + row_tile;
    const int col = k0 + col_s + lane_col;
    const bool drops = kDrops && p.dropout_threshold > 0;
    const float dropout_scale = static_cast<float>(p.dropout_scale);
    if (drops)
      for_each(
          dp, [&](float& x, int m, int n, int i) { x = kept(m, n, i) ? x * dropout_scale : 0.0f; });
    for_each(
        dp, [&](float& x, int m, int, int i) { x -= smem.delta[row_tile + 16 * m + 8 * (i / 2)]; });
    float mask_factor = 1.0f;  // of the scores that a bias is added to
    if (kAllTerms && p.score.natural) {
      const ScoreTerms terms(p, place.seq, step.head);
      if (terms.softcap > 0.0f) {
        for_each(s, [&](float& x, int m, int n, int i) {
          const float t = terms.capped<kExact>(x);
          x = terms.softcap * t;
          if (!kOfTerms) dp[m][n][i] *= 1.0f - t * t;
        });
      } else if (mask_partial && mask.additive() && terms.only_scale()) {
        mask_factor = terms.scale;
      } else {
        for_each(s, [&](float& x, int, int, int) { x *= terms.scale; });
      }
      terms.add_alibi(s, row, col);
    } else if (kBias) {
      mask_factor = static_cast<float>(p.scale);
    } else if (p.score.sign != 1.0f) {
      for_each(s, [&](float& x, int, int, int) { x *= p.score.sign; });
    }
    if (kMasks && mask_partial) mask.apply(s, row_tile, col_s + lane_col, mask_factor);
    if (!full) hide_unseen(s, p.band, place.seq.shift, place.seq.len_k, row, col);
    if (kBias || (kAllTerms && p.score.natural)) {
      for_each(s, [&](float& x, int m, int, int i) {
        const int r = row_tile + 16 * m + 8 * (i / 2);
        const float lo = p.row_lse_lo ? smem.lse_lo[r] : 0.0f;
        x = ptx::exp2(fmaf(x - smem.lse[r], kLog2e, -lo * kLog2e));
      });
    } else {
      for_each(s, [&](float& x, int m, int, int i) {
        const int r = row_tile + 16 * m + 8 * (i / 2);
        x = ptx::exp2(fmaf(x, p.score.unit, -smem.lse[r] * kLog2e));
      });
    }
    for_each(s, [&](float& x, int m, int n, int i) { dp[m][n][i] *= x; });
    if (drops)
      for_each(
          s, [&](float& x, int m, int n, int i) { x = kept(m, n, i) ? x * dropout_scale : 0.0f; });
  }
  template <typename F>
  static __device__ void for_each(Scores& x, F f) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) f(x[m][n][i], m, n, i);
  }
};

}  // namespace flashbpt::sm80
