// S = scale * Q K^T   P = exp2(S - reference)   l = sum P   O = P V / l   LSE = reference + log l
//
// Who does what: a block stays on its multiprocessor and takes one tile of query rows of one head
// after the other, the longest first, from a counter. One thread of warpgroup 0 copies Q, K and V
// by TMA; the others (math warpgroups) own 64 rows each. They walk over the keys from the first
// tile on, so that blocks which start together share what the cache holds; S, P and O stay in
// registers.
//
// A step of a math warpgroup issues S of a tile and, behind it, O += P V of the tile before; while
// the tensor cores do the latter it makes P of this tile. The warpgroups take turns to issue, so
// that one multiplies while another exponentiates.
//
// P is made by the reference as it stands, without a maximum (attention/softmax.h, weigh_ahead). S
// is kept until that has proved right; if not, O and the sums move to a new reference.
//
// Barriers (mbarriers; tile/pipeline.h)
//   q, k, v: full   the copying thread and its bytes; the tile may be read
//            empty  each math warp; the tile may be replaced
//   works:   full   the copying thread; a Work may be read        empty   each math warp
// Named barriers: kTurn + w, 256 threads: warpgroup w may issue (the one before arrives).
//
// docs/attn_fwd_sm90.md
#pragma once

#include "../../attention/softmax.h"
#include "../../ptx/barrier.h"
#include "../../ptx/grid.h"
#include "../../ptx/setmaxnreg.h"
#include "../../ptx/tma.h"
#include "../../tile/pipeline.h"
#include "../../tile/store_quads.h"
#include "../../tile/wgmma_operand.h"
#include "config.h"
#include "schedule.h"

namespace flashbpt::sm90 {

template <size_t kRow>
struct AttnFwd {
  static constexpr AttnFwdConfig kConfig = kAttnFwdKernels[kRow].config;
  static constexpr bool kTerms = kAttnFwdKernels[kRow].terms;
  using T = typename tile::ElementOf<kAttnFwdKernels[kRow].dtype>::Type;

  static constexpr int kBlockQ = kConfig.block_q(), kBlockK = kConfig.block_k;
  static constexpr int kWarpgroups = kConfig.warpgroups;
  static constexpr int kQStages = kConfig.q_stages, kStages = kConfig.stages;
  static constexpr int kN = kBlockK / 8;           // column pieces of S
  static constexpr int kO = kConfig.head_dim / 8;  // and of O
  enum NamedBarrier { kTurn = 1 };

  using TileQ = tile::SwizzledTile<kBlockQ, kConfig.head_dim>;
  using TileKV = tile::SwizzledTile<kBlockK, kConfig.head_dim>;
  using Softmax = OnlineSoftmax<1, false>;
  using Scores = float[1][kN][4];
  using Output = float[1][kO][4];
  using Weights = uint32_t[kN / 2][4];  // P as operand a

  struct SmemPlan {
    alignas(1024) char q[kQStages][TileQ::kBytes];
    char k[kStages][TileKV::kBytes];
    char v[kStages][TileKV::kBytes];
    tile::PipelineSmem<kQStages> q_pipe;
    tile::PipelineSmem<kStages> k_pipe, v_pipe;
    tile::PipelineSmem<2> work_pipe;
    Work works[2];
  };
  static_assert(sizeof(SmemPlan) <= kConfig.smem_bytes());

  const AttnFwdKernelParams& p;
  SmemPlan& smem;
  const tile::Pipeline<kQStages> q_pipe{smem.q_pipe};
  const tile::Pipeline<kStages> k_pipe{smem.k_pipe}, v_pipe{smem.v_pipe};
  const tile::Pipeline<2> work_pipe{smem.work_pipe};
  tile::RingPlace<kQStages> q_at;
  tile::RingPlace<kStages> k_at, v_at;  // V of a tile comes when K of the next has been asked for
  tile::RingPlace<2> work_at;

  __device__ AttnFwd(const AttnFwdKernelParams& p, SmemPlan& smem) : p(p), smem(smem) {}

  // By one thread, before anybody waits.
  __device__ void init() const {
    constexpr int kMathWarps = 4 * kWarpgroups;
    q_pipe.init(kMathWarps);
    k_pipe.init(kMathWarps);
    v_pipe.init(kMathWarps);
    work_pipe.init(kMathWarps);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(p.q_map);
    ptx::prefetch_tensor_map(p.k_map);
    ptx::prefetch_tensor_map(p.v_map);
  }

  // ------------------------------------------------------------------------- the copying thread

  __device__ void copy() {
    const uint32_t count = p.order.tiles * p.order.heads;
    for (uint32_t index = blockIdx.x; index < count;) {
      const uint32_t next = gridDim.x + atomicAdd(p.counters, 1);
      Work& work = free_work();
      find_work<kBlockQ, kBlockK>(p, index, work);
      hand_out();
      if (work.tiles() > 0) copy_work(work);
      index = next;
    }
    free_work().batch = -1;
    hand_out();
    // The last block to end leaves the counters as it found them.
    __threadfence();
    if (atomicAdd(p.counters + 1, 1) == static_cast<int>(gridDim.x) - 1)
      p.counters[0] = p.counters[1] = 0;
  }

  __device__ Work& free_work() const {
    work_pipe.wait_empty(work_at);
    return smem.works[work_at.stage()];
  }
  __device__ void hand_out() {
    ptx::mbarrier_arrive(work_pipe.full(work_at));
    work_at.advance();
  }

  __device__ void copy_work(const Work& work) {
    copy_keys(k_pipe, k_at, p.k_map, smem.k, work, work.tile<kTerms>(0));
    q_pipe.start_filling(q_at, TileQ::kBytes);
    copy_tile<TileQ>(smem.q[q_at.stage()], p.q_map, q_pipe.full(q_at), ptx::CacheHint::kEvictFirst,
                     work.q0, work.head, work.batch);
    q_at.advance();
    for (int i = 1; i < work.tiles(); ++i) {
      copy_keys(k_pipe, k_at, p.k_map, smem.k, work, work.tile<kTerms>(i));
      copy_keys(v_pipe, v_at, p.v_map, smem.v, work, work.tile<kTerms>(i - 1));
    }
    copy_keys(v_pipe, v_at, p.v_map, smem.v, work, work.tile<kTerms>(work.tiles() - 1));
  }

  __device__ void copy_keys(const tile::Pipeline<kStages>& pipe, tile::RingPlace<kStages>& at,
                            const CUtensorMap& map, char (*stages_smem)[TileKV::kBytes],
                            const Work& work, int tile) {
    pipe.start_filling(at, TileKV::kBytes);
    copy_tile<TileKV>(stages_smem[at.stage()], map, pipe.full(at), ptx::CacheHint::kEvictLast,
                      tile * kBlockK, work.kv_head, work.batch);
    at.advance();
  }

  // Chunk by chunk; rows past the end of the head and columns past its width become zeros.
  template <typename Tile>
  static __device__ void copy_tile(char* to, const CUtensorMap& map, uint32_t full,
                                   ptx::CacheHint hint, int row, int head, int batch) {
#pragma unroll
    for (int c = 0; c < Tile::kChunks; ++c)
      ptx::tma_load_4d(tile::smem_address(to) + c * Tile::kChunkBytes, map, full, hint,
                       c * Tile::kChunkCols, row, head, batch);
  }

  // -------------------------------------------------------------------------- a math warpgroup

  struct Operands {
    tile::SmemOperand<TileQ, ptx::Major::kInner> q;  // the warpgroup's rows
    tile::SmemOperand<TileKV, ptx::Major::kInner> k;
    tile::SmemOperand<TileKV, ptx::Major::kOuter> v;
  };

  __device__ void compute(int warpgroup) {
    const Operands operands{
        decltype(Operands::q)(tile::smem_address(smem.q), 64 * warpgroup),
        decltype(Operands::k)(tile::smem_address(smem.k)),
        decltype(Operands::v)(tile::smem_address(smem.v)),
    };
    if (warpgroup == kWarpgroups - 1) hand_over(warpgroup);  // the first one may start
    for (;; work_at.advance()) {
      work_pipe.wait_full(work_at);
      // Stays in shared memory: registers are short.
      const Work& work = smem.works[work_at.stage()];
      if (!work.any()) break;
      Softmax softmax(p.score.unit, false);
      Output o;
#pragma unroll
      for (int i = 0; i < 4 * kO; ++i) o[0][i / 4][i % 4] = 0.0f;
      if (work.tiles() > 0) attend(work, operands, warpgroup, o, softmax);
      finish(work, warpgroup, o, softmax);
      __syncwarp();
      work_pipe.release(work_at);
    }
  }

  __device__ void wait_turn(int warpgroup) const { ptx::barrier_sync(kTurn + warpgroup, 256); }
  __device__ void hand_over(int warpgroup) const {
    ptx::barrier_arrive(kTurn + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1), 256);
  }

  __device__ void attend(const Work& work, const Operands& operands, int warpgroup, Output& o,
                         Softmax& softmax) {
    Weights p_reg, p_next_reg;
    const int tiles = work.tiles();
    q_pipe.wait_full(q_at);
    k_pipe.wait_full(k_at);
    first_step(work, operands, warpgroup, p_reg, softmax);
    // Two steps a turn, so that P and the next one change names and not registers.
    int i = 1;
    for (; i + 1 < tiles; i += 2) {
      step(work, operands, warpgroup, i, p_reg, p_next_reg, o, softmax);
      step(work, operands, warpgroup, i + 1, p_next_reg, p_reg, o, softmax);
    }
    if (i < tiles) {
      step(work, operands, warpgroup, i, p_reg, p_next_reg, o, softmax);
#pragma unroll
      for (int j = 0; j < 2 * kN; ++j) p_reg[j / 4][j % 4] = p_next_reg[j / 4][j % 4];
    }
    q_pipe.release(q_at);
    q_at.advance();
    // O += P V, the last tile's
    v_pipe.wait_full(v_at);
    tile::start_gemm<T>(o[0], p_reg, operands.v.stage(v_at.stage()));
    softmax.finish();
    ptx::wgmma_wait<0>();
    ptx::pin(o[0]);
    ptx::pin(p_reg);
    v_pipe.release(v_at);
    v_at.advance();
  }

  // P of the first tile, with its maximum as the reference.
  __device__ void first_step(const Work& work, const Operands& operands, int warpgroup,
                             Weights& p_reg, Softmax& softmax) {
    Scores s;
    const int begin = work.tile<kTerms>(0) * kBlockK;
    // S = Q K^T
    tile::start_gemm<T, true>(s[0], operands.q.stage(q_at.stage()), operands.k.stage(k_at.stage()));
    ptx::wgmma_wait<0>();
    ptx::pin(s[0]);
    k_pipe.release(k_at);
    k_at.advance();
    if (!scores_are_products(work, begin)) finish_scores(work, warpgroup, begin, s);
    softmax.start(s);
    tile::pack<T>(s[0], p_reg);
  }

  // P of tile number i into p_next_reg, and O += P V of the tile before it from p_reg.
  __device__ void step(const Work& work, const Operands& operands, int warpgroup, int i,
                       Weights& p_reg, Weights& p_next_reg, Output& o, Softmax& softmax) {
    Scores s;
    // Read early: what comes between S and P holds everything up.
    const int begin = work.tile<kTerms>(i) * kBlockK;
    const bool finished = scores_are_products(work, begin);
    // One warpgroup alone waits for the copies: the others follow it.
    if (warpgroup == 0) k_pipe.wait_full(k_at);
    wait_turn(warpgroup);
    // S = Q K^T
    tile::start_gemm<T, true>(s[0], operands.q.stage(q_at.stage()), operands.k.stage(k_at.stage()));
    if (warpgroup == 0) v_pipe.wait_full(v_at);
    // O += P V
    tile::start_gemm<T>(o[0], p_reg, operands.v.stage(v_at.stage()));
    hand_over(warpgroup);
    ptx::wgmma_wait<1>();  // S is there
    ptx::pin(s[0]);
    k_pipe.release(k_at);
    k_at.advance();
    if (!finished) finish_scores(work, warpgroup, begin, s);
    // The wait inside is each warp's own, though PTX wants the warpgroup to branch as one: without
    // a branch before the next wait ptxas puts that before the exponentials, or serializes wgmma.
    if (!softmax.template weigh_ahead<T>(s, p_next_reg)) {
      ptx::wgmma_wait<0>();
      ptx::pin(o[0]);
      softmax.update(s, o, [](float (&)[1][2]) {});
      tile::pack<T>(s[0], p_next_reg);
    }
    ptx::wgmma_wait<0>();  // O is there; P and V are free
    ptx::pin(o[0]);
    ptx::pin(p_reg);
    v_pipe.release(v_at);
    v_at.advance();
  }

  static __device__ int row_of(int warpgroup) {
    return 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  }

  // Of the tile of keys that starts at `begin`: no terms, and every row sees every key.
  __device__ bool scores_are_products(const Work& work, int begin) const {
    if (kTerms && (p.score.natural || p.score.sign != 1.0f)) return false;
    return begin >= work.seen_begin && begin + kBlockK <= work.seen_end;
  }

  __device__ void finish_scores(const Work& work, int warpgroup, int begin, Scores& s) const {
    const int row = work.q0 + row_of(warpgroup), col = begin + threadIdx.x % 4 * 2;
    if (kTerms && p.score.natural)
      add_terms(s, work.slope, static_cast<float>(row + p.diagonal_near - col));
    else if (kTerms && p.score.sign != 1.0f)
      ScoreTerms::for_each(s, [&](float& x, int, int) { x *= p.score.sign; });
    if (begin >= work.seen_begin && begin + kBlockK <= work.seen_end) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      hide_outside(s[0], half, p.keys.begin(row + 8 * half) - col,
                   p.keys.end(row + 8 * half) - col);
  }

  // Scale, softcap, ALiBi. from_first: of this lane's first row from its first key, on the
  // diagonal.
  __device__ void add_terms(Scores& s, float slope, float from_first) const {
    if (p.cap > 0.0f)
      ScoreTerms::for_each(s, [&](float& x, int, int) { x = p.cap * fast_tanh(x * p.cap_unit); });
    else
      ScoreTerms::for_each(s, [&](float& x, int, int) { x *= p.scale_fp32; });
    ScoreTerms::add_alibi(s, slope, from_first);
  }

  // O / l and LSE, to memory.
  __device__ void finish(const Work& work, int warpgroup, Output& o, const Softmax& softmax) const {
    const int row = work.q0 + row_of(warpgroup), rows = static_cast<int>(p.len_q) - row;
    const float* const sink =
        p.sinks ? static_cast<const float*>(p.sinks.data) + work.head : nullptr;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto [top, sum, factor] = softmax.end(0, half, sink, 1.0f);
#pragma unroll
      for (int n = 0; n < kO; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i)
          o[0][n][i] = factor == 0.0f ? 0.0f : o[0][n][i] * factor;
      if (threadIdx.x % 4 == half && 8 * half < rows) {
        float* const lse = static_cast<float*>(p.lse.data);
        lse[work.batch * p.lse.batch + work.head * p.lse.head + (row + 8 * half) * p.lse.row] =
            top + logf(sum);
      }
    }
    T* const out = static_cast<T*>(p.out.data) + work.batch * p.out.batch + work.head * p.out.head;
    tile::store_quads(o[0], out + row * p.out.row, p.out.row, rows, static_cast<int>(p.dim_v));
  }
};

template <size_t kRow>
__global__ void __launch_bounds__(AttnFwd<kRow>::kConfig.threads(), 1)
    attn_fwd_kernel(const __grid_constant__ AttnFwdKernelParams p) {
  ptx::follow_earlier_grids();
  using Fwd = AttnFwd<kRow>;
  extern __shared__ __align__(1024) char smem_raw[];
  Fwd fwd(p, *reinterpret_cast<typename Fwd::SmemPlan*>(smem_raw));
  if (threadIdx.x == 0) fwd.init();
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the same, and known to be
  if (warpgroup == 0) {
    ptx::give_registers<Fwd::kConfig.copy_regs>();
    if (threadIdx.x == 0) fwd.copy();
  } else {
    ptx::take_registers<Fwd::kConfig.math_regs>();
    fwd.compute(warpgroup - 1);
  }
}

}  // namespace flashbpt::sm90
