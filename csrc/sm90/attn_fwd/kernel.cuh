// S = scale * Q K^T   P = exp2(S - reference)   l = sum P   O = P V / l   LSE = reference + log l
//
// Who does what: a block stays on its multiprocessor and takes one tile of query rows of one head
// after the other, the longest first, from a counter. Of warpgroup 0 a warp finds them (works.cuh)
// and one copies Q, K and V by TMA (copies.cuh; page_copies.cuh); the others (math warpgroups) own
// 64 rows each. They walk over the keys from the first tile on, so that blocks which start together
// share what the cache holds; S, P and O stay in registers.
//
// A step of a math warpgroup issues S of a tile and, behind it, O += P V of the tile before; while
// the tensor cores do the latter it makes P of this tile. The warpgroups take turns to issue, so
// that one multiplies while another exponentiates. S of the next work's first tile comes behind the
// last O += P V, beside the output.
//
// P is made by the reference as it stands, without a maximum (attention/softmax.h, weigh_ahead). S
// is kept until that has proved right; if not, O and the sums move to a new reference.
//
// Barriers (mbarriers; tile/pipeline.h)
//   q:  full   the copying thread and its bytes; the warpgroup's rows may be read
//       empty  each of its warps; they may be replaced
//   kv: full   the copying thread and its bytes (pages: warps or threads); the tile may be read
//       empty  each math warp; the tile may be replaced
//   bias (an additive mask): as q
//   works: full   the finding thread; a Work may be read    empty   each math and copying warp
//   next_wanted   the copying thread, once a work; the next one may be found (not where all four
//                 warps copy pages: one of them finds works itself)
// Named barriers
//   kTurn + w, 256 threads: warpgroup w may issue (the one before arrives), and K_i and V_i-1 are
//     there, since warpgroup 0 has waited for them; tiles - 1 turns a work
//   kCleared + w, 128 threads: its warps have cleared what follows a sequence in V
//
// docs/attn_fwd_sm90.md
#pragma once

#include "../../attention/mask_terms.h"
#include "../../attention/softmax.h"
#include "../../ptx/barrier.h"
#include "../../ptx/grid.h"
#include "../../ptx/setmaxnreg.h"
#include "../../tile/store_pairs.h"
#include "copies.cuh"
#include "page_copies.cuh"
#include "plan.cuh"
#include "works.cuh"

namespace flashbpt::sm90 {

template <size_t kRow>
struct AttnFwd : AttnFwdPlan<kRow> {
  using Plan = AttnFwdPlan<kRow>;
  using Plan::bias_at, Plan::kv_at, Plan::kv_pipe, Plan::kWarpgroups, Plan::q_at, Plan::smem;
  using Plan::kBlockK, Plan::kConfig, Plan::kDropout, Plan::kStageBytes, Plan::kMasks, Plan::kPages,
      Plan::kStages, Plan::kTerms, Plan::p;
  using Plan::kTurn, Plan::kCleared;
  using Plan::Plan;
  using Plan::work_at, Plan::work_pipe;
  using typename Plan::T, typename Plan::TileBias, typename Plan::TileK, typename Plan::TileQ;
  using typename Plan::TileV;

  static constexpr int kN = kBlockK / 8;        // column pieces of S
  static constexpr int kO = kConfig.dim_v / 8;  // and of O

  using Softmax = OnlineSoftmax<1, kMasks>;
  using Scores = float[1][kN][4];
  using Output = float[1][kO][4];
  using Weights = uint32_t[kN / 2][4];  // P as operand a

  struct Operands {
    tile::SmemOperand<TileQ, ptx::Major::kInner> q;  // one stage after kWarpgroups tiles
    tile::SmemOperand<TileK, ptx::Major::kInner> k;
    tile::SmemOperand<TileV, ptx::Major::kOuter> v;
  };

  __device__ void compute(int warpgroup) {
    const Operands operands{
        decltype(Operands::q)(tile::smem_address(smem.q[0][warpgroup])),
        decltype(Operands::k)(tile::smem_address(smem.kv)),
        decltype(Operands::v)(tile::smem_address(smem.kv)),
    };
    if (warpgroup == kWarpgroups - 1) hand_over(warpgroup);  // the first one may start
    Scores s;                                                // of a work's first tile
    bool started = false;
    for (;; work_at.advance()) {
      work_pipe.wait_full(work_at);
      // Stays in shared memory: registers are short.
      const Work& work = smem.works[work_at.stage()];
      if (!work.any()) break;
      if (work.tiles == 0) {
        write_no_keys(work, warpgroup);
      } else {
        if (!started) {
          wait_first_copies(warpgroup);
          start_scores(operands, s);
          ptx::wgmma_wait<0>();
          ptx::pin(s[0]);
        }
        Softmax softmax(p.score.unit, this->additive());
        Output o;
#pragma unroll
        for (int i = 0; i < 4 * kO; ++i) o[0][i / 4][i % 4] = 0.0f;
        Weights p_reg;
        const tile::RingPlace<kStages> v_at =
            attend(work, operands, warpgroup, s, p_reg, o, softmax);
        // The next work's first scores come behind the last product, beside the output.
        work_pipe.wait_full(work_at.next());
        const Work& next = smem.works[work_at.next().stage()];
        started = next.any() && next.tiles > 0;
        if (started) wait_first_copies(warpgroup);
        // Of no use if there is none, and then of whatever is there: a branch would serialize
        // wgmma.
        start_scores(operands, s);
        softmax.finish();
        ptx::wgmma_wait<1>();  // O is there
        ptx::pin(o[0]);
        ptx::pin(p_reg);
        kv_pipe.release(v_at);
        finish(work, warpgroup, o, softmax);
        ptx::wgmma_wait<0>();  // S is there
        ptx::pin(s[0]);
      }
      __syncwarp();
      work_pipe.release(work_at);
    }
  }

  __device__ void wait_turn(int warpgroup) const {
    if (kWarpgroups > 1) ptx::barrier_sync(kTurn + warpgroup, 256);
  }
  __device__ void hand_over(int warpgroup) const {
    if (kWarpgroups > 1)
      ptx::barrier_arrive(kTurn + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1), 256);
  }

  // K or V. The copy engine's writes are the tensor cores' to read, gathered rows need a fence.
  __device__ void wait_keys(const tile::RingPlace<kStages>& at) const {
    kv_pipe.wait_full(at);
    if constexpr (kPages) {
      if (p.pages.gathers()) ptx::fence_proxy_async();
    }
  }
  // Q and K of a work's first tile.
  __device__ void wait_first_copies(int warpgroup) const {
    this->q_pipe(warpgroup).wait_full(q_at);
    wait_keys(kv_at);
  }
  // S = Q K^T, issued.
  __device__ void start_scores(const Operands& operands, Scores& s) const {
    tile::start_gemm<T, true>(s[0], operands.q.stage(q_at.stage() * kWarpgroups),
                              operands.k.template stage<kStageBytes>(kv_at.stage()));
  }

  // From the first tile's scores to O += P V of the last one, issued; returns where that V is.
  __device__ tile::RingPlace<kStages> attend(const Work& work, const Operands& operands,
                                             int warpgroup, Scores& s, Weights& p_reg, Output& o,
                                             Softmax& softmax) {
    const int tiles = work.tiles, own = own_tiles(work, warpgroup);
    first_weights(work, warpgroup, s, p_reg, softmax);
    Weights p_next_reg;
    int i = 1;
    // Two steps a turn, so that P and the next one change names and not registers.
    for (; i < own; ++i) {
      step(work, operands, warpgroup, i, p_reg, p_next_reg, o, softmax);
      if (++i == own) {
#pragma unroll
        for (int j = 0; j < 2 * kN; ++j) p_reg[j / 4][j % 4] = p_next_reg[j / 4][j % 4];
        break;
      }
      step(work, operands, warpgroup, i, p_next_reg, p_reg, o, softmax);
    }
    this->q_pipe(warpgroup).release(q_at);
    q_at.advance();
    if (i < tiles) pass_turn(warpgroup);
    // O += P V
    wait_keys(kv_at);
    clear_past_end(warpgroup, kv_at);
    tile::start_gemm<T>(o[0], p_reg, operands.v.template stage<kStageBytes>(kv_at.stage()));
    const tile::RingPlace<kStages> v_at = kv_at;
    kv_at.advance();
    // Tiles that only other warpgroups see.
    for (; i < tiles; ++i) {
      if (i + 1 < tiles) pass_turn(warpgroup);
      kv_pipe.wait_full(kv_at);
      release_keys();
    }
    return v_at;
  }

  __device__ void release_keys() {
    kv_pipe.release(kv_at);
    kv_at.advance();
  }

  // How many of a work's tiles hold keys that the warpgroup's rows see, but for what is between
  // them; one at least.
  __device__ int own_tiles(const Work& work, int warpgroup) const {
    if ((kTerms && !work.ascends()) || (kMasks && p.mask)) return work.tiles;
    const int last_row = min(work.q0 + 64 * warpgroup + 64, work.len_q) - 1;
    const int keys = work.keys.end(last_row) - work.tile_begin * kBlockK;
    return max((keys + kBlockK - 1) / kBlockK, 1);
  }

  // The warpgroup has no product of the next tile of K: the others may issue theirs.
  __device__ void pass_turn(int warpgroup) {
    wait_keys(kv_at);
    if (warpgroup == 0) wait_keys(kv_at.next());
    wait_turn(warpgroup);
    hand_over(warpgroup);
    release_keys();
  }

  // P of the first tile, with its maximum as the reference.
  __device__ void first_weights(const Work& work, int warpgroup, Scores& s, Weights& p_reg,
                                Softmax& softmax) {
    const KeyTile keys = key_tile(work, 0, kv_at);
    if (kMasks) __syncwarp();  // all lanes have read what is beside the stage
    release_keys();
    float shift[2] = {};
    if (!scores_are_products(work, keys)) finish_scores(work, warpgroup, keys, s, shift);
    if (kTerms && keys.slope != 0.0f) add_shift(s, shift);
    softmax.start(s);
    tile::pack<T>(s[0], p_reg);
    drop(work, warpgroup, keys, p_reg);
  }

  // P of tile number i into p_next_reg, and O += P V of the tile before it from p_reg.
  __device__ void step(const Work& work, const Operands& operands, int warpgroup, int i,
                       Weights& p_reg, Weights& p_next_reg, Output& o, Softmax& softmax) {
    Scores s;
    // Read early: what comes between S and P holds everything up.
    KeyTile keys{};
    bool finished = false;
    if (!kMasks) {
      keys = key_tile(work, i, kv_at);
      finished = scores_are_products(work, keys);
    }
    const tile::RingPlace<kStages> v_at = kv_at.next();
    // One warpgroup alone waits for the copies: the others follow it.
    if (warpgroup == 0) wait_keys(kv_at);
    if (kTerms) clear_past_end(warpgroup, v_at);
    wait_turn(warpgroup);
    start_scores(operands, s);
    if (warpgroup == 0) wait_keys(v_at);
    // O += P V
    tile::start_gemm<T>(o[0], p_reg, operands.v.template stage<kStageBytes>(v_at.stage()));
    hand_over(warpgroup);
    if (kMasks) {
      keys = key_tile(work, i, kv_at);  // now it is there
      finished = scores_are_products(work, keys);
      if (keys.masked) prefetch_mask(work, warpgroup, keys.begin);
    }
    ptx::wgmma_wait<1>();  // S is there
    ptx::pin(s[0]);
    release_keys();
    float shift[2] = {};
    if (!finished) finish_scores(work, warpgroup, keys, s, shift);
    // The wait inside is each warp's own, though PTX wants the warpgroup to branch as one: without
    // a branch before the next wait ptxas puts that before the exponentials, or serializes wgmma.
    if (!softmax.template weigh_ahead<T>(s, shift, p_next_reg)) {
      ptx::wgmma_wait<0>();
      ptx::pin(o[0]);
      if (kTerms && keys.slope != 0.0f) add_shift(s, shift);
      softmax.update(s, o, [](float (&)[1][2]) {});
      tile::pack<T>(s[0], p_next_reg);
    }
    drop(work, warpgroup, keys, p_next_reg);
    ptx::wgmma_wait<0>();  // O is there; P and V are free
    ptx::pin(o[0]);
    ptx::pin(p_reg);
    release_keys();
  }

  // V of a packed sequence's last tile: what follows the sequence would meet weights of zero, but
  // NaN times zero is NaN. Each warpgroup clears it, and waits for itself alone.
  __device__ void clear_past_end(int warpgroup, const tile::RingPlace<kStages>& at) const {
    if (!p.packed() || (kPages && p.pages.gathers())) return;  // gathered rows end with zeros
    kv_pipe.wait_full(at);
    const int rows = smem.kv_words[at.stage()];
    if (rows >= kBlockK) return;
    char* const from = smem.kv[at.stage()] + rows * TileV::kRowBytes;
    for (int c = 0; c < TileV::kChunks; ++c)
      for (int byte = 16 * (threadIdx.x % 128); byte < (kBlockK - rows) * TileV::kRowBytes;
           byte += 16 * 128)
        *reinterpret_cast<uint4*>(from + c * TileV::kChunkBytes + byte) = uint4{};
    ptx::fence_proxy_async();
    ptx::barrier_sync(kCleared + warpgroup, 128);
  }

  // ----------------------------------------------------------------- from products to scores

  struct KeyTile {
    int begin;
    bool masked;
    bool seen;    // every key by every row
    float slope;  // of ALiBi, in the unit of the scores; 0: none
  };
  // Tile number i, whose K is in that stage. Without terms the rest is asked for where it is used,
  // which costs those kernels 3 % less.
  __device__ KeyTile key_tile(const Work& work, int i, const tile::RingPlace<kStages>& at) const {
    if (!kTerms && !kMasks) return {work.tile<kTerms>(i) * kBlockK};
    const int word = kMasks ? smem.kv_words[at.stage()] : work.tile<kTerms>(i) * kBlockK;
    const int begin = kMasks ? word & ~1 : word;
    return {begin, kMasks && (word & 1) != 0, all_seen(work, begin),
            kTerms ? work.slope * p.slope_unit : 0.0f};
  }

  __device__ bool drops() const { return kDropout && p.dropout_threshold > 0; }

  // Of the sequence, from an element on.
  __device__ BooleanMaskPart mask_part(const Work& work, int row, int col) const {
    return {p.mask, work.batch, work.head, row, col, work.len_q - row, work.keys.len_k - col};
  }
  __device__ void prefetch_mask(const Work& work, int warpgroup, int begin) const {
    mask_part(work, work.q0 + 64 * warpgroup, begin).prefetch<kBlockK>(threadIdx.x % 128 / 2);
  }
  __device__ void drop(const Work& work, int warpgroup, const KeyTile& keys, Weights& p_reg) const {
    if (drops())
      DropoutRows(work.dropout, work.head, work.q0 + row_of(warpgroup), keys.begin + col_of())
          .drop(p_reg);
  }

  static __device__ int row_of(int warpgroup) {
    return 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  }

  static __device__ int col_of() { return threadIdx.x % 4 * 2; }

  // No terms, and every row sees every key.
  __device__ bool scores_are_products(const Work& work, const KeyTile& keys) const {
    if (!kTerms && !kMasks) return all_seen(work, keys.begin);
    return keys.seen && !keys.masked && !p.score.natural && p.score.sign == 1.0f && p.cap == 0.0f &&
           keys.slope == 0.0f;
  }
  __device__ bool all_seen(const Work& work, int begin) const {
    return begin >= work.seen_begin && begin + kBlockK <= work.seen_end;
  }

  // shift: what is left to add to a row's scores, all of them alike.
  __device__ void finish_scores(const Work& work, int warpgroup, const KeyTile& keys, Scores& s,
                                float (&shift)[2]) {
    const int row = work.q0 + row_of(warpgroup), col = keys.begin + col_of();
    // Alone, a bias takes the scale along.
    const bool only_bias = this->additive() && (!kTerms || (p.cap == 0.0f && keys.slope == 0.0f));
    if (kTerms && !only_bias) {
      cap_scores(s);
      add_distances(work, warpgroup, keys, row + work.keys.diagonal - col, s, shift);
    }
    if constexpr (kMasks) {
      if (this->additive()) {
        this->bias_pipe(warpgroup).wait_full(bias_at);
        add_bias<T, TileBias>(s[0], only_bias ? p.scale_fp32 : 1.0f,
                              tile::smem_address(smem.bias[bias_at.stage()][warpgroup]), row_of(0),
                              col_of());
        __syncwarp();
        this->bias_pipe(warpgroup).release(bias_at);
        bias_at.advance();
      } else if (keys.masked) {
        mask_part(work, row, col).apply(s[0]);
      }
    }
    if (kTerms || kMasks ? keys.seen : all_seen(work, keys.begin)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      hide_outside(s[0], half, work.keys.begin(row + 8 * half) - col,
                   work.keys.end(row + 8 * half) - col);
  }

  // Softcap, or what the unit of the scores leaves to do of the scale.
  __device__ void cap_scores(Scores& s) const {
    if (p.cap > 0.0f) {
      ScoreTerms::for_each(s, [&](float& x, int, int) { x = capped(x * p.cap_unit); });
      if (p.score.natural) ScoreTerms::for_each(s, [&](float& x, int, int) { x *= p.cap; });
    } else if (p.score.natural) {
      ScoreTerms::for_each(s, [&](float& x, int, int) { x *= p.scale_fp32; });
    } else if (p.score.sign != 1.0f) {
      ScoreTerms::for_each(s, [&](float& x, int, int) { x *= p.score.sign; });
    }
  }
  // ALiBi. On one side of the diagonal it is linear: what grows along a row is added, the rest is
  // the row's shift. from_first: from this lane's first key to its first row, on the diagonal.
  __device__ void add_distances(const Work& work, int warpgroup, const KeyTile& keys,
                                int from_first, Scores& s, float (&shift)[2]) const {
    if (keys.slope == 0.0f) return;
    const int corner = work.q0 + 64 * warpgroup + work.keys.diagonal - keys.begin;
    const bool left = corner >= kBlockK - 1, right = corner + 63 <= 0;
    if (!left && !right)
      return ScoreTerms::add_alibi(s, keys.slope, static_cast<float>(from_first));
    const float slope = left ? keys.slope : -keys.slope;
    ScoreTerms::for_each(s, [&](float& x, int, int c) { x = fmaf(slope, c, x); });
#pragma unroll
    for (int half = 0; half < 2; ++half)
      shift[half] = -slope * static_cast<float>(from_first + 8 * half);
  }
  static __device__ void add_shift(Scores& s, const float (&shift)[2]) {
    ScoreTerms::for_each(s, [&](float& x, int r, int) { x += shift[r / 8]; });
  }
  // tanh, whose approximation is coarser than fp16.
  static __device__ float capped(float x) {
    return std::is_same_v<T, __half> ? fast_tanh(x) : ptx::tanh(x);
  }

  // Zeros and LSE of rows that see no key.
  __device__ void write_no_keys(const Work& work, int warpgroup) const {
    const int row = work.q0 + 64 * warpgroup + threadIdx.x % 128 / 2;
    if (row >= work.len_q) return;
    T* const out = out_row(work, row);
    for (int col = threadIdx.x % 2 * 8; col < p.dim_v; col += 16)
      *reinterpret_cast<uint4*>(out + col) = uint4{};
    if (threadIdx.x % 2 == 0) write_lse(work, row, p.sinks ? *sink_of(work) : -INFINITY, 0.0f);
  }

  __device__ T* out_row(const Work& work, int row) const {
    return static_cast<T*>(p.out.data) + work.batch * p.out.batch + work.head * p.out.head +
           (work.q_begin + row) * p.out.row;
  }
  __device__ int64_t lse_offset(const Work& work, int row, const TensorView& t) const {
    return work.batch * t.batch + work.head * t.head + (work.q_begin + row) * t.row;
  }
  // LSE is top + log_sum, and in two parts where there is room for them.
  __device__ void write_lse(const Work& work, int row, float top, float log_sum) const {
    const float lse = top + log_sum;
    static_cast<float*>(p.lse.data)[lse_offset(work, row, p.lse)] = lse;
    if (kMasks && p.lse_lo)
      static_cast<float*>(p.lse_lo.data)[lse_offset(work, row, p.lse_lo)] =
          isfinite(lse) ? (top - lse) + log_sum : 0.0f;
  }
  __device__ const float* sink_of(const Work& work) const {
    return static_cast<const float*>(p.sinks.data) + work.head;
  }

  // O / l and LSE, to memory.
  __device__ void finish(const Work& work, int warpgroup, Output& o, const Softmax& softmax) const {
    const int row = work.q0 + row_of(warpgroup), rows = work.len_q - row;
    const float* const sink = p.sinks ? sink_of(work) : nullptr;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto end =
          softmax.end(0, half, sink, kDropout ? static_cast<float>(p.dropout_scale) : 1.0f);
#pragma unroll
      for (int n = 0; n < kO; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) o[0][n][i] *= end.factor;
      // Zeros, whatever V holds.
      if (__any_sync(~0u, end.factor == 0.0f)) {
#pragma unroll
        for (int n = 0; n < kO; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i)
            if (end.factor == 0.0f) o[0][n][i] = 0.0f;
      }
      if (threadIdx.x % 4 == half && 8 * half < rows)
        write_lse(work, row + 8 * half, end.top, end.log_sum());
    }
    tile::store_pairs(o[0], out_row(work, row), p.out.row, rows, static_cast<int>(p.dim_v));
  }
};

template <size_t kRow>
__global__ void __launch_bounds__(AttnFwdPlan<kRow>::kConfig.threads(),
                                  AttnFwdPlan<kRow>::kConfig.blocks)
    attn_fwd_kernel(const __grid_constant__ AttnFwdKernelParams p) {
  ptx::follow_earlier_grids();
  using Plan = AttnFwdPlan<kRow>;
  constexpr AttnFwdConfig kConfig = Plan::kConfig;
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Plan::SmemPlan*>(smem_raw);
  if (threadIdx.x == 0) Plan(p, smem).init();
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same, and known to be
  if (warp >= 4) {
    ptx::take_registers<kConfig.math_regs>();
    AttnFwd<kRow>(p, smem).compute(warp / 4 - 1);
    return;
  }
  ptx::give_registers<kConfig.copy_regs>();
  if constexpr (Plan::kPages) {
    if (warp < p.pages.warps) return AttnFwdPageCopies<kRow>(p, smem).copy();
  }
  if (warp == 3) {
    if (threadIdx.x % 32 < Plan::kThreads) AttnFwdWorks<kRow>(p, smem).find();
  } else if (!Plan::kPages && warp == 0) {
    if (threadIdx.x < Plan::kThreads) AttnFwdCopies<kRow>(p, smem).copy();
  }
}

}  // namespace flashbpt::sm90
