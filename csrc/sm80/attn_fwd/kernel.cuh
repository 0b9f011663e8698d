// S = scale * Q K^T (+ terms)   P = exp(S - m)   l = sum P   O = P V / l   LSE = m + log l
//
// Who does what: a block owns block_q query rows of one head, each warp its own 16 or 32 of them,
// and walks over the keys in tiles of block_k. S, P and O stay in registers; Q, one tile of K and
// one of V (and of a mask) in shared memory, filled by asynchronous copies: V of a tile comes while
// its S is computed, K of the next one during P V. The second block of the multiprocessor fills the
// waits.
//
// Barriers, two a tile, of all warps: before S (K is there; nobody reads V), before P V (V is
// there; nobody reads K or the mask).
//
// Pairs: where the registers hold 16 rows of O only, two warps share 32, each half of the keys of S
// and half of the columns of O. They exchange the rows' maxima, P, and at the end the sums; what
// both read of Q and what each reads of K and V is then half of what two warps of 16 rows would.
//
// Splits: a block takes one of p.splits.count parts of its keys. Slices: heads wider than the tile
// go in slices of V and O, one a block, and S is summed over pieces of Q and K that pass through
// the same tiles.
//
// docs/attn_fwd.md
#pragma once

#include "../../attention/dropout.h"
#include "../../attention/find_sequence.h"
#include "../../attention/mask_stage.h"
#include "../../attention/mask_window.h"
#include "../../attention/score_terms.h"
#include "../../attention/softmax.h"
#include "../../attention/tile_order.h"
#include "../../ptx/barrier.h"
#include "../../ptx/grid.h"
#include "../../tile/copy.h"
#include "../../tile/gemm.h"
#include "../../tile/store.h"
#include "../paged_tile.h"
#include "config.h"
#include "launch.h"
#include "schedule.h"

namespace flashbpt::sm80 {

// kRow: the row of kKernels. kTf32: fp32 inputs in single TF32 products. Params: of dense and
// packed keys, or of keys in pages.
template <const auto& kKernels, size_t kRow, bool kTf32, typename Params>
struct AttnFwdOf {
  static constexpr AttnFwdConfig kConfig = kKernels[kRow].config;
  static constexpr bool kPaged = Params::kPaged;
  static constexpr bool kMasks = kKernels[kRow].terms != Terms::kNone;
  static constexpr bool kAllTerms = kKernels[kRow].terms == Terms::kAll;
  static constexpr bool kDrops = kAllTerms || kKernels[kRow].terms == Terms::kDropout;
  using T = typename tile::ElementOf<kKernels[kRow].dtype>::Type;

  static constexpr int kBlockQ = kConfig.block_q;
  static constexpr int kBlockK = kConfig.block_k;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kMinBlocks = kConfig.min_blocks;
  static constexpr int kPair = kConfig.warps_k;  // warps that share rows
  static constexpr int kM = kConfig.warp_rows() / 16;
  static constexpr int kN = kBlockK / kPair / 8;   // column pieces of a warp's S
  static constexpr int kO = kHeadDim / kPair / 8;  // column pieces of its O
  static constexpr int kSteps = kHeadDim / tile::kInner<T>;
  static constexpr int kStepsPv = kBlockK / tile::kInner<T>;
  static constexpr bool kExact = sizeof(T) == 4;
  static constexpr tile::Precision kPrecision =
      kTf32 ? tile::Precision::kTf32 : tile::Precision::k3xTf32;

  using Tile = tile::SmemTile<kConfig.row_bytes()>;
  using TileP = tile::SmemTile<kBlockK * sizeof(T)>;
  using Mask =
      MaskStage<kBlockQ, kBlockK, kThreads, kAllTerms ? MaskKind::kAny : MaskKind::kBoolean>;
  using Softmax = OnlineSoftmax<kM, kAllTerms>;
  using Kept = KeptBits<kM, kN>;

  struct SmemPlan {
    alignas(1024) char q[kBlockQ][kConfig.row_bytes()];  // at the end: O on its way out
    char k[kBlockK][kConfig.row_bytes()];
    char v[kBlockK][kConfig.row_bytes()];
    alignas(128) char p[kPair > 1 ? kBlockQ : 0][kBlockK * sizeof(T)];
    float row_values[kPair > 1 ? kPair : 0][kBlockQ];  // maxima, at the end sums, of each half
    // Here, since the loop needs the registers:
    FwdPlace place;
    ScoreTerms terms;
    Dropout dropout;
    char padding[AttnFwdConfig::kPlaceBytes - sizeof(FwdPlace) - sizeof(ScoreTerms) -
                 sizeof(Dropout)];
    alignas(16) PagedTileSmem<kBlockK> pages[kPaged];
    char mask[];  // [kBlockQ, kBlockK] of the mask's own type, rows padded
  };

  static_assert(sizeof(PagedTileSmem<kBlockK>) <= paged_tile_bytes(kBlockK));

  const Params& p;
  SmemPlan& smem;
  const FwdPlace& place;
  const int pair_warp = threadIdx.x / 32 % kPair;
  const int warp_row = threadIdx.x / 32 / kPair * kConfig.warp_rows();
  const int row = warp_row + threadIdx.x % 32 / 4;  // this lane's first row, in the tile
  const int col_s = pair_warp * (kBlockK / kPair) + threadIdx.x % 4 * 2;   // and column of S
  const int col_o = pair_warp * (kHeadDim / kPair) + threadIdx.x % 4 * 2;  // and of O
  const Tile q_smem, k_smem, v_smem;
  const char* const q_gmem;  // row q0
  const char* const k_gmem;  // row 0 of the sequence
  const char* const v_gmem;  // the same, first column of the slice
  Mask mask;
  const ScoreTerms& terms;
  const Dropout& dropout;

  __device__ AttnFwdOf(const Params& p, SmemPlan& smem)
      : p(p),
        smem(smem),
        place(smem.place),
        q_smem{tile::smem_address(smem.q)},
        k_smem{tile::smem_address(smem.k)},
        v_smem{tile::smem_address(smem.v)},
        q_gmem(rows_gmem(p.q, place.head, place.seq.q_begin + place.q0)),
        k_gmem(rows_gmem(p.k, place.kv_head, place.seq.k_begin)),
        v_gmem(rows_gmem(p.v, place.kv_head, place.seq.k_begin) + slice_bytes(place.slice)),
        mask(p.mask, p.access.mask, tile::smem_address(smem.mask)),
        terms(smem.terms),
        dropout(smem.dropout) {}

  __device__ TileP p_smem() const { return {tile::smem_address(smem.p)}; }

  static __device__ int64_t slice_bytes(int slice) {
    return int64_t{slice} * kHeadDim * static_cast<int64_t>(sizeof(T));
  }
  __device__ const char* rows_gmem(const TensorView& t, int64_t head, int64_t row) const {
    return reinterpret_cast<const char*>(static_cast<const T*>(t.data) + place.seq.batch * t.batch +
                                         head * t.head + row * t.row);
  }
  // Bytes of a row from the given slice on.
  static __device__ int row_bytes_from(int64_t dim, int slice) {
    return static_cast<int>(dim * static_cast<int64_t>(sizeof(T)) - slice_bytes(slice));
  }

  __device__ void load_q(int slice) const {
    tile::load_tile<kBlockQ, kThreads>(
        q_smem, {q_gmem + slice_bytes(slice), p.q.row * int64_t{sizeof(T)}, p.access.q},
        static_cast<int>(place.seq.len_q) - place.q0, row_bytes_from(p.dim, slice));
  }
  __device__ auto pages() const {
    return PagedTile<kBlockK, kThreads, Tile>(p.pages, smem.pages[0]);
  }
  __device__ void load_keys(const Tile& to, const char* from, const TensorView& t, int access,
                            int key_tile, int row_bytes) const {
    const int64_t stride = t.row * int64_t{sizeof(T)};
    if constexpr (kPaged) {
      pages().load(to, from, &t == &p.v, stride, row_bytes, access, key_tile);
    } else {
      tile::load_tile<kBlockK, kThreads>(to, {from + key_tile * kBlockK * stride, stride, access},
                                         static_cast<int>(place.seq.len_k) - key_tile * kBlockK,
                                         row_bytes);
    }
  }
  __device__ void load_k(int key_tile, int slice) const {
    load_keys(k_smem, k_gmem + slice_bytes(slice), p.k, p.access.k, key_tile,
              row_bytes_from(p.dim, slice));
  }
  __device__ void load_v(int key_tile) const {
    load_keys(v_smem, v_gmem, p.v, p.access.v, key_tile, row_bytes_from(p.dim_v, place.slice));
  }
  __device__ void load_mask(int key_tile) {
    mask.load(place.seq.batch, place.head, place.q0, key_tile * kBlockK,
              static_cast<int>(place.seq.len_q) - place.q0,
              static_cast<int>(place.seq.len_k) - key_tile * kBlockK);
  }

  // State of a tile under the boolean mask: bit 0 any, bit 1 all.
  __device__ int mask_state(int key_tile) const {
    constexpr int kRowParts = (kBlockQ + MaskTiles::kRows - 1) / MaskTiles::kRows;
    return p.mask_tiles.template state<kRowParts, kBlockK / MaskTiles::kCols>(
        place.seq.batch, place.head, place.q0 / MaskTiles::kRows,
        key_tile * (kBlockK / MaskTiles::kCols), p.len_q, p.len_k);
  }

  // S += Q K^T, over all slices of Q and K.
  __device__ void scores(float (&s)[kM][kN][4], int key_tile) const {
    const tile::SmemA<T, kM, Tile> q(q_smem, warp_row);
    const tile::SmemB<T, kN, Tile> k(k_smem, pair_warp * (kBlockK / kPair));
    if constexpr (kAllTerms) {
      for (int slice = 0; slice < p.slices_qk - 1; ++slice) {
        load_q(slice);
        load_k(key_tile, slice);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();
        tile::gemm<T, kPrecision, kSteps>(s, q, k);
        __syncthreads();
      }
      if (p.slices_qk > 1) {
        load_q(p.slices_qk - 1);
        load_k(key_tile, p.slices_qk - 1);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();
      }
    }
    tile::gemm<T, kPrecision, kSteps>(s, q, k);
  }

  // Scores as the softmax takes them: with their terms, and -inf where a key is not seen.
  __device__ void finish_scores(float (&s)[kM][kN][4], int key_tile, bool mask_partial,
                                bool seen_by_all) const {
    const int first = place.q0 + row, col = key_tile * kBlockK + col_s;
    const bool natural = kAllTerms && p.score.natural, masked = kMasks && mask_partial;
    // A bias takes the scale along.
    const bool scales_later = natural && masked && mask.additive() && terms.only_scale();
    if (natural && !scales_later)
      terms.apply<kExact>(s, first, col);
    else if (!natural && p.score.sign != 1.0f)
      ScoreTerms::for_each(s, [&](float& x, int, int) { x *= p.score.sign; });
    if (masked) mask.apply(s, row, col_s, scales_later ? terms.scale : 1.0f);
    if (!seen_by_all) hide_unseen(s, p.band, place.seq.shift, place.seq.len_k, first, col);
  }

  __device__ DropoutTile<kM, kN> dropout_tile(int key_tile) const {
    return {dropout, place.head, place.q0 + row, key_tile * kBlockK + col_s};
  }
  // Draws and drops piece by piece.
  __device__ void draw_and_drop(float (&s)[kM][kN][4], int key_tile) const {
    const DropoutTile<kM, kN> draws = dropout_tile(key_tile);
#pragma unroll
    for (int piece = 0; piece < Kept::kPieces; ++piece) {
      const int m = piece % kM, n = piece / kM * 2;
      const uint32_t bits = draws.draw(piece);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (!(bits >> Kept::bit(i / 4, i % 4) & 1)) s[m][n + i / 4][i % 4] = 0.0f;
    }
  }
  static __device__ void drop(float (&s)[kM][kN][4], const Kept& kept) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = kept(m, n, i) ? s[m][n][i] : 0.0f;
  }

  // x [kM][2], a value a row that all lanes of a quad hold alike, becomes combine(x, y) with the y
  // of the other warp of the pair. Two barriers of the block must lie between calls.
  template <typename Combine>
  __device__ void share_rows(float (&x)[kM][2], Combine combine) const {
    if constexpr (kPair > 1) {
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i)
        if (threadIdx.x % 4 == 0) smem.row_values[pair_warp][row + 8 * i] = x[i / 2][i % 2];
      ptx::barrier_sync(1 + threadIdx.x / 64, 64);
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        float& mine = x[i / 2][i % 2];
        mine = combine(mine, smem.row_values[pair_warp ^ 1][row + 8 * i]);
      }
    }
  }

  template <typename EachStep>
  __device__ void add_pv(float (&o)[kM][kO][4], const tile::RegistersA<T, kM, kN>& probabilities,
                         EachStep each_step) const {
    const tile::SmemTransposedB<T, kO, Tile> v(v_smem, pair_warp * (kHeadDim / kPair));
    if constexpr (kPair > 1)
      tile::gemm<T, kPrecision, kStepsPv>(o, tile::SmemA<T, kM, TileP, true>(p_smem(), warp_row), v,
                                          each_step);
    else
      tile::gemm<T, kPrecision, kStepsPv>(o, probabilities, v, each_step);
  }

  // The tiles of place.tiles; o and the softmax's sums are what is left to normalise.
  __device__ void run(float (&o)[kM][kO][4], Softmax& softmax) {
    const bool masked = kMasks && p.mask_tiles.data != nullptr;
    const bool additive = kAllTerms && p.mask && !masked;
    const bool one_slice = !kAllTerms || p.slices_qk == 1;
    const bool drops = kDrops && p.dropout_threshold > 0;
    const int tile_end = place.tile_end;
    MaskWindow window;
    const auto next_tile = [&](int from) {
      return window.next(from, tile_end, masked, [&](int t) { return mask_state(t); });
    };
    // The copies of a tile that come before its S.
    const auto load_first = [&](int key_tile, bool mask_partial) {
      if (one_slice) load_k(key_tile, 0);
      if (kMasks && mask_partial) load_mask(key_tile);
    };
    int key_tile = next_tile(place.tile_begin);
    if (key_tile >= tile_end) return;
    bool mask_partial = additive || (masked && !window.full(key_tile));
    if (one_slice) load_q(0);
    if constexpr (kPaged) {
      pages().fetch(key_tile);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      pages().put(key_tile);
      __syncthreads();  // where the first tile's keys lie is there
      pages().fetch(key_tile + 1);
    }
    load_first(key_tile, mask_partial);
    ptx::cp_async_commit();
    // What dropout keeps of a tile is drawn beside the products of the one before; other terms
    // leave no registers for that.
    constexpr bool kDrawsAhead = !kAllTerms;
    Kept kept;
    if (kDrawsAhead && drops) dropout_tile(key_tile).draw_share(kept, 0, 1);
    while (key_tile < tile_end) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // K is there, and nobody reads V and P
      const int begin = key_tile * kBlockK;
      const bool seen_by_all = begin >= place.seen_begin && begin + kBlockK <= place.seen_end;
      load_v(key_tile);
      ptx::cp_async_commit();
      float s[kM][kN][4];
      tile::clear(s);
      scores(s, key_tile);
      if constexpr (kPaged) {  // beside the products
        pages().put(key_tile + 1);
        pages().fetch(key_tile + 2);
        ptx::cp_async_commit();
      }
      finish_scores(s, key_tile, mask_partial, seen_by_all);
      softmax.update(s, o, [&](float (&top)[kM][2]) {
        share_rows(top, [](float x, float y) { return fmaxf(x, y); });
      });
      if (kDrawsAhead && drops) drop(s, kept);
      if (!kDrawsAhead && drops) draw_and_drop(s, key_tile);
      if constexpr (kPair > 1) tile::store_smem<T>(s, p_smem(), row, col_s);
      const tile::RegistersA<T, kM, kN> probabilities(s);
      const int next = next_tile(key_tile + 1);
      const bool next_partial = additive || (masked && next < tile_end && !window.full(next));
      ptx::cp_async_wait<0>();
      __syncthreads();  // V and P are there, and nobody reads K or the mask
      if (next < tile_end) {
        load_first(next, next_partial);
        ptx::cp_async_commit();
      }
      // O += P V
      if (kDrawsAhead && drops && next < tile_end) {
        const DropoutTile<kM, kN> draws = dropout_tile(next);
        add_pv(o, probabilities, [&](int step) { draws.draw_share(kept, step, kStepsPv); });
      } else {
        add_pv(o, probabilities, tile::Nothing());
      }
      key_tile = next;
      mask_partial = next_partial;
    }
  }

  // O / l and LSE. The sink joins the sum as one more key without a value.
  __device__ void finish(float (&o)[kM][kO][4], Softmax& softmax) const {
    softmax.finish();
    __syncthreads();  // nobody reads the last maxima
    share_rows(softmax.sum, [](float x, float y) { return x + y; });
    // LSE: of the rows of a quad each lane writes one.
    static_assert(2 * kM <= 4);
    const int lane = threadIdx.x % 4;
    float lane_top = 0.0f, lane_sum = 0.0f, factors[kM][2];
    bool dead = false;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, half = i % 2;
      const bool has_sink = p.sinks && place.split == 0;
      const float* const sink =
          has_sink ? static_cast<const float*>(p.sinks.data) + place.head : nullptr;
      const auto [top, sum, factor] =
          softmax.end(m, half, sink, static_cast<float>(p.dropout_scale));
      if (lane == i) lane_top = top, lane_sum = sum;
      dead |= factor == 0.0f;
#pragma unroll
      for (int n = 0; n < kO; ++n)
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) o[m][n][j] *= factor;
      factors[m][half] = factor;
    }
    if (__any_sync(0xffffffffu, dead)) clear_dead(o, factors);
    const int r = place.q0 + row + 8 * lane;
    if (lane < 2 * kM && pair_warp == 0 && place.slice == 0 && r < place.seq.len_q)
      write_lse(r, lane_top, lane_sum);
  }
  // Rows whose factor is 0, whatever V holds.
  static __device__ void clear_dead(float (&o)[kM][kO][4], const float (&factors)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kO; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (factors[m][i / 2] == 0.0f) o[m][n][i] = 0.0f;
  }

  __device__ void write_lse(int r, float top, float sum) const {
    const float log_sum = logf(sum), lse = top + log_sum;
    const int64_t at = place.seq.q_begin + r;
    const auto put = [&](const TensorView& t, int64_t offset, float x) {
      static_cast<float*>(
          t.data)[offset + place.seq.batch * t.batch + place.head * t.head + at * t.row] = x;
    };
    if (p.splits.count > 1) return put(p.splits.lse, place.split * p.splits.lse_stride, lse);
    put(p.lse, 0, lse);
    if (p.lse_lo) put(p.lse_lo, 0, isfinite(lse) ? (top - lse) + log_sum : 0.0f);
  }

  // Row q0, first column of the slice.
  template <typename Out>
  __device__ Out* out_gmem(const TensorView& t) const {
    return static_cast<Out*>(t.data) + place.seq.batch * t.batch + place.head * t.head +
           (place.seq.q_begin + place.q0) * t.row + place.slice * kHeadDim;
  }

  __device__ void store(const float (&o)[kM][kO][4]) const {
    const int cols = static_cast<int>(p.dim_v) - place.slice * kHeadDim;
    const int rows = static_cast<int>(place.seq.len_q) - place.q0;
    if (kExact || p.splits.count > 1) {
      const TensorView& to = p.splits.count > 1 ? p.splits.out : p.out;
      const int64_t part = p.splits.count > 1 ? place.split * p.splits.out_stride : 0;
      tile::store_fp32(o, out_gmem<float>(to) + part + row * to.row + col_o, to.row, rows - row,
                       cols - col_o, p.access.out >= 8);
    } else if constexpr (!kExact) {
      // Across the rows of Q's tile that the warp or the pair owns, to leave as whole chunks.
      tile::store_smem<T>(o, q_smem, row, col_o);
      if constexpr (kPair > 1)
        ptx::barrier_sync(1 + threadIdx.x / 64, 64);
      else
        __syncwarp();
      tile::store_chunks<kConfig.warp_rows(), 32 * kPair>(q_smem, warp_row, out_gmem<T>(p.out),
                                                          p.out.row, rows, cols, p.access.out,
                                                          threadIdx.x % (32 * kPair));
    }
  }
};

template <size_t kRow, bool kTf32>
using AttnFwd = AttnFwdOf<kAttnFwdKernels, kRow, kTf32, AttnFwdKernelParams>;

// The whole of a block.
template <typename Fwd, typename Params>
__device__ void attend(const Params& p) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Fwd::SmemPlan*>(smem_raw);
  if (threadIdx.x < 32) {
    const FwdPlace found = find_fwd_place<Fwd::kBlockQ, Fwd::kBlockK>(p, blockIdx.x);
    if (threadIdx.x == 0) {
      smem.place = found;
      if constexpr (Fwd::kPaged) {
        smem.pages[0].entries = paged_entries(p.pages.table, found.seq.batch);
        smem.pages[0].first =
            static_cast<int>(p.band.of_row(found.q0, found.seq.shift, found.seq.len_k).begin);
        smem.pages[0].end = static_cast<int>(found.seq.len_k);
      }
      if (Fwd::kMasks) {
        smem.terms = ScoreTerms(p, found.seq, found.head);
        if (Fwd::kDrops && p.dropout_threshold > 0) smem.dropout = Dropout(p, found.seq);
      }
    }
  }
  __syncthreads();
  if (smem.place.empty) return;
  Fwd fwd(p, smem);
  typename Fwd::Softmax softmax(p.score.unit, p.score.natural);
  float o[Fwd::kM][Fwd::kO][4];
  tile::clear(o);
  fwd.run(o, softmax);
  fwd.finish(o, softmax);
  fwd.store(o);
}

template <size_t kRow, bool kTf32>
__global__ void __launch_bounds__(AttnFwd<kRow, kTf32>::kThreads, AttnFwd<kRow, kTf32>::kMinBlocks)
    attn_fwd_kernel(const __grid_constant__ AttnFwdKernelParams p) {
  ptx::follow_earlier_grids();
  attend<AttnFwd<kRow, kTf32>>(p);
}

}  // namespace flashbpt::sm80
