// S = scale * Q K^T (terms)    P = exp(S - r)    l = sum P    O = P V / l    LSE = r + log l
//
// over the keys of a paged cache, for few query rows a request. Bound by memory: each key and
// value is read once for all heads of its group.
//
// Who does what: a team's share of the keys is a list of segments, each of one item (schedule.h).
// Of a segment's keys each warp takes every kWarps-th step of block_k: it looks up where they lie a
// step before their copies, has up to kStages steps of copies under way in a ring of its own, into
// the next segments too, multiplies, and keeps its own softmax, so that warps wait for each other
// at the end of a segment alone. There their states are merged, O through that stage of each ring
// which is free. Items that several teams share are joined at the end of the shares (parts.h).
//
// Barriers: within a warp __syncwarp before each copy into a stage and after each wait for copies;
// of the block, for each segment, when Q is there, when the states of the warps are there, and when
// they are read (stages may be filled, Q overwritten).
//
// docs/paged.md
#pragma once

#include <cstddef>

#include "../../attention/softmax.h"
#include "../../ptx/grid.h"
#include "../../tile/gemm.h"
#include "../../tile/vector.h"
#include "fp8_operands.h"
#include "key_copies.h"
#include "parts.h"
#include "scores.h"

namespace flashbpt::sm80 {

template <size_t kRow>
struct PagedDecode {
  static constexpr PagedDecodeConfig kConfig = kPagedDecodeKernels[kRow].config;
  using T = typename tile::ElementOf<kPagedDecodeKernels[kRow].dtype>::Type;
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kMinBlocks = kConfig.min_blocks;
  static constexpr int kWarps = kConfig.warps;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kRows = kConfig.rows;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kBlockK = kConfig.block_k;
  static constexpr int kUnitKeys = kConfig.unit_keys();
  static constexpr int kMergedColumns = kConfig.merged_columns();
  static constexpr int kM = kRows / 16, kN = kBlockK / 8, kO = kHeadDim / 8;
  static constexpr int kSteps = kHeadDim / tile::kInner<T>;
  static constexpr int kStepsPv = kBlockK / tile::kInner<T>;
  static constexpr tile::Precision kPrecision = tile::Precision::k3xTf32;
  static constexpr CacheType kCache = kPagedDecodeKernels[kRow].cache;
  static constexpr bool kFp8 = kCache != CacheType::kSame;

  using Copies = KeyCopies<kConfig>;
  using Parts = PagedParts<kConfig>;
  using Tile = typename Copies::Tile;
  using QTile = tile::SmemTile<kHeadDim * sizeof(T)>;
  template <bool kTerms>
  using Scores = PagedScores<kM, sizeof(T) == 4, kTerms>;
  using Softmax = OnlineSoftmax<kM, true>;

  struct SmemPlan {
    alignas(1024) char ring[kWarps][kStages][2][kBlockK][kConfig.row_bytes()];  // K, V
    alignas(1024) char q[kRows][kHeadDim * sizeof(T)];
    float top[kWarps][kRows];  // references in logarithms to base 2
    float sum[kWarps][kRows];
    int free_stage[kWarps];
    PagedShare<kConfig> share;
    typename Parts::Smem parts;
  };

  static_assert(offsetof(SmemPlan, parts) + sizeof(typename Parts::Smem) <= kConfig.smem_bytes());

  const PagedDecodeParams& p;
  SmemPlan& smem;
  const int team, kv_head;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ PagedDecode(const PagedDecodeParams& p, SmemPlan& smem)
      : p(p),
        smem(smem),
        team(p.schedule.heads_kv.quotient(blockIdx.x)),
        kv_head(p.schedule.heads_kv.remainder(blockIdx.x)) {}

  // ------------------------------------------------------------------------------------ the share

  __device__ void run() const {
    const Parts parts(p, team, kv_head, smem.parts, smem.q);
    parts.start();
    find_share<kConfig>(p, p.schedule, team, smem.share);
    if (!smem.share.any) return clear_tail();
    Copies copies(p, smem.share, kv_head);
    Segments<kConfig> segments = smem.share.others;
    Segment s = smem.share.first;
    QRegisters q;
    fetch_q(s, q, 0);
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage)
      copies.feed(tile_of(stage, 0), tile_of(stage, 1));
    int stage = 0;
    while (true) {
      put_q(q, 0);
      for (int round = 1; round < kConfig.q_rounds(); ++round) {
        fetch_q(s, q, round);
        put_q(q, round);
      }
      __syncthreads();  // Q is there
      if (Scores<true>::any_terms(p, kv_head))
        attend<true>(s, copies, stage);
      else
        attend<sizeof(T) == 4>(s, copies, stage);
      if (!s.whole()) parts.arrive(s, smem.share.each);
      if (!segments.next(p, p.schedule, s)) break;
      fetch_q(s, q, 0);
    }
    ptx::cp_async_wait<0>();
    parts.finish([&](int64_t at, const float (&x)[4], int columns) { store(at, x, columns); });
    clear_tail();
  }

  // Rows of no request: the last block's.
  __device__ void clear_tail() const {
    if (!p.cu_seqlens_q || blockIdx.x + 1 != gridDim.x) return;
    for (int64_t r = p.cu_seqlens_q[p.batch] + warp; r < p.tokens; r += kWarps)
      for (int head = 0; head < p.heads_q; ++head) {
        for (int c = 4 * lane; c < p.dim_v; c += 4 * 32)
          store(r * p.out.row + head * p.out.head + c, {}, static_cast<int>(p.dim_v) - c);
        if (lane == 0) static_cast<float*>(p.lse.data)[r * p.lse.row + head] = -INFINITY;
      }
  }

  // ------------------------------------------------------------------------------------ a segment

  __device__ Tile tile_of(int stage, int which) const {
    return {tile::smem_address(smem.ring[warp][stage][which])};
  }

  // stage: that of the next step. kTerms: the rare terms have a loop of their own, or they would
  // push the other one's instructions out of the cache.
  template <bool kTerms>
  __device__ void attend(const Segment& s, Copies& copies, int& stage) const {
    const tile::SmemA<T, kM, QTile> q(QTile{tile::smem_address(smem.q)}, 0);
    const Scores<kTerms> scores(p, s, kv_head);
    Softmax softmax(kTerms ? kLog2e : kLog2e * Scores<kTerms>::scale(p, kv_head), kTerms);
    float o[kM][kO][4];
    tile::clear(o);
    for (int key = s.begin + warp * kBlockK; key < s.end; key += kUnitKeys) {
      __syncwarp();  // nobody reads the stage before
      const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
      copies.feed(tile_of(free_stage, 0), tile_of(free_stage, 1));
      ptx::cp_async_wait<kStages - 1>();
      __syncwarp();  // the step's keys and values are there
      // S = Q K^T
      float x[kM][kN][4];
      tile::clear(x);
      if constexpr (kFp8)
        tile::gemm<T, kPrecision, kSteps>(x, q, Fp8Keys<kCache, Tile>{tile_of(stage, 0)});
      else
        tile::gemm<T, kPrecision, kSteps>(x, q, tile::SmemB<T, kN, Tile>(tile_of(stage, 0), 0));
      scores.finish(x, key);
      softmax.update(x, o, [](float (&)[kM][2]) {});
      // O += P V
      const tile::RegistersA<T, kM, kN> probabilities(x);
      if constexpr (kFp8)
        tile::gemm<T, kPrecision, kStepsPv>(o, probabilities,
                                            Fp8Values<kCache, Tile>(tile_of(stage, 1)));
      else
        tile::gemm<T, kPrecision, kStepsPv>(
            o, probabilities, tile::SmemTransposedB<T, kO, Tile>(tile_of(stage, 1), 0));
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    softmax.finish();
    merge(s, o, softmax, stage == 0 ? kStages - 1 : stage - 1);
  }

  // ------------------------------------------------------------------------------------ Q and O

  // A tile of Q on its way: 16 bytes of a row in each, zeros where there is no row or column.
  static constexpr int kQVectors = kConfig.q_vectors();
  using QRegisters = uint4[kQVectors];
  struct QPlace {
    int row, column;
  };
  // In memory Q has elements of T's size: with fp8 caches 16-bit types alone.
  static __device__ QPlace q_place(int round, int i) {
    constexpr int kElements = 16 / sizeof(T), kVectors = kHeadDim / kElements;
    const int vector = (round * kQVectors + i) * kThreads + threadIdx.x;
    return {vector / kVectors, vector % kVectors * kElements};
  }
  __device__ void fetch_q(const Segment& s, QRegisters& x, int round) const {
#pragma unroll
    for (int i = 0; i < kQVectors; ++i) {
      const QPlace place = q_place(round, i);
      const PagedRow at = row_of(p.schedule, s.row_tile, kv_head, place.row);
      x[i] = {};
      if (at.token >= s.request.rows || place.column >= p.dim) continue;
      const char* const from =
          static_cast<const char*>(p.q.data) +
          ((s.request.row_begin + at.token) * p.q.row + at.head * p.q.head + place.column) *
              int64_t{sizeof(T)};
      if (p.access_q == tile::kChunkBytes)
        x[i] = *reinterpret_cast<const uint4*>(from);
      else
        x[i] = tile::gather_chunk<Bits>(
            from, min(16, static_cast<int>(p.dim - place.column) * static_cast<int>(sizeof(T))),
            sizeof(T));
    }
  }
  __device__ void put_q(const QRegisters& x, int round) const {
    const QTile to{tile::smem_address(smem.q)};
#pragma unroll
    for (int i = 0; i < kQVectors; ++i) {
      const QPlace place = q_place(round, i);
      if constexpr (!kFp8) {
        ptx::store_shared_16(to.chunk(place.row, place.column / (16 / sizeof(T))), x[i]);
      } else {
        const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t word = words[j];
          if (p.q.dtype == DataType::kBFloat16) {
            const float2 pair = tile::Element<__nv_bfloat16>::unpack(word);
            word = tile::Element<T>::pack(pair.x, pair.y);
          }
          const int column = Fp8Keys<kCache, Tile>::q_column(place.column + 2 * j);
          ptx::store_shared(to.at(place.row, column * static_cast<int>(sizeof(T))), word);
        }
      }
    }
  }

  // Four columns of the output, or fewer at the end of a row.
  __device__ void store(int64_t at, const float (&x)[4], int columns) const {
    if (kFp8 && p.out.dtype == DataType::kBFloat16)
      store_as<__nv_bfloat16>(at, x, columns);
    else
      store_as<T>(at, x, columns);
  }
  template <typename Out>
  __device__ void store_as(int64_t at, const float (&x)[4], int columns) const {
    Out* const out = static_cast<Out*>(p.out.data) + at;
    if (p.out_vectors && columns >= 4) {
      *reinterpret_cast<tile::Vector<Out, 4>*>(out) = tile::Vector<Out, 4>::round(x);
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (j < columns) out[j] = tile::Element<Out>::from_float(x[j]);
  }

  // --------------------------------------------------------------- the states of the warps as one

  // O [16, kMergedColumns] of a warp, in its free stage: eight columns c of row r at c ^ 8 (r % 4),
  // so that rows g of a quarter of a warp are apart by eight banks.
  __device__ uint32_t merged_row(int w, int r) const {
    return tile::smem_address(smem.ring[w][smem.free_stage[w]]) + r * kMergedColumns * 4;
  }
  static __device__ int merged_column(int r, int c) { return c ^ (r % 4 * 8); }
  // What a lane has of 16 columns of a row: of O [16 m + g + 8 half, 8 n ... 8 n + 15].
  __device__ void put_o(uint32_t row_smem, int r, const float (&o)[kO][4], int n, int half,
                        int column) const {
    if constexpr (kFp8) {
      ptx::store_shared_16(
          row_smem + merged_column(r, column + threadIdx.x % 4 * 4) * 4,
          {__float_as_uint(o[n][2 * half]), __float_as_uint(o[n + 1][2 * half]),
           __float_as_uint(o[n][2 * half + 1]), __float_as_uint(o[n + 1][2 * half + 1])});
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ptx::store_shared_float2(
            row_smem + merged_column(r, column + 8 * i) * 4 + threadIdx.x % 4 * 8,
            {o[n + i][2 * half], o[n + i][2 * half + 1]});
    }
  }

  // What the state of a row is made of: the warps' shares, of those that saw a key, and log of the
  // denominator.
  struct Weights {
    float warp[kWarps];
    bool any[kWarps];
    float lse;
  };
  __device__ Weights weigh(const Segment& s, int r, const PagedRow& at) const {
    Weights weights;
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, smem.top[w][r]);
    float sink = -INFINITY;
    if (s.whole() && p.sinks) {
      sink = static_cast<const float*>(p.sinks.data)[at.head] * kLog2e;
      top = fmaxf(top, sink);
    }
    float sum = sink == -INFINITY ? 0.0f : ptx::exp2(sink - top);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      weights.any[w] = smem.top[w][r] != -INFINITY;
      weights.warp[w] = weights.any[w] ? ptx::exp2(smem.top[w][r] - top) : 0.0f;
      sum += weights.warp[w] * smem.sum[w][r];
    }
    const float v_scale = p.v.scale ? p.v.scale[kv_head * p.v.scale_stride] : 1.0f;
    const float factor = sum == 0.0f ? 0.0f : v_scale / sum;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) weights.warp[w] *= factor;
    weights.lse = sum == 0.0f ? -INFINITY : top * kLn2 + logf(sum);
    return weights;
  }

  __device__ void merge(const Segment& s, const float (&o)[kM][kO][4], const Softmax& softmax,
                        int free_stage) const {
    const int g = lane / 4;
    if (lane == 0) smem.free_stage[warp] = free_stage;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (lane % 4 == 0) {
          smem.top[warp][g + 16 * m + 8 * half] = softmax.reference[m][half] * softmax.unit;
          smem.sum[warp][g + 16 * m + 8 * half] = softmax.sum[m][half];
        }
    __syncwarp();  // free_stage is there
    const uint32_t low = merged_row(warp, g), high = merged_row(warp, g + 8);
    // Rolled, here and in merge_rows: what runs once waits for its instructions.
    constexpr int kPieces = kHeadDim / kMergedColumns;
#pragma unroll 1
    for (int i = 0; i < kM * kPieces; ++i) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
          if (i == m * kPieces + piece) {
#pragma unroll
            for (int c = 0; c < kMergedColumns; c += 16) {
              put_o(low, g, o[m], (piece * kMergedColumns + c) / 8, 0, c);
              put_o(high, g, o[m], (piece * kMergedColumns + c) / 8, 1, c);
            }
          }
      __syncthreads();  // the states are there
      merge_rows(s, i / kPieces * 16, i % kPieces * kMergedColumns);
      __syncthreads();  // they are read
    }
  }
  // Columns [first, first + kMergedColumns) of 16 rows from row m0 on: neighbouring threads share a
  // row.
  __device__ void merge_rows(const Segment& s, int m0, int first) const {
    constexpr int kSharing = kThreads / 16;
    const int r = threadIdx.x / kSharing;
    const PagedRow at = row_of(p.schedule, s.row_tile, kv_head, m0 + r);
    if (at.token >= s.request.rows) return;
    const Weights weights = weigh(s, m0 + r, at);
    const int64_t token = s.request.row_begin + at.token;
    const int columns = min(kMergedColumns, static_cast<int>(p.dim_v) - first);
    const int64_t out = token * p.out.row + at.head * p.out.head + first;
    float* const partial =
        p.partial_out +
        int64_t{p.schedule.partial_row(team, kv_head, s.first, m0 + r)} * p.partial_width() + first;
    uint32_t rows[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) rows[w] = merged_row(w, r);
#pragma unroll 1
    for (int c = threadIdx.x % kSharing * 4; c < columns; c += 4 * kSharing) {
      uint4 parts[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
        parts[w] = ptx::load_shared_16(rows[w] + merged_column(r, c) * 4);
      float x[4] = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (!weights.any[w]) parts[w] = {};
        x[0] += weights.warp[w] * __uint_as_float(parts[w].x);
        x[1] += weights.warp[w] * __uint_as_float(parts[w].y);
        x[2] += weights.warp[w] * __uint_as_float(parts[w].z);
        x[3] += weights.warp[w] * __uint_as_float(parts[w].w);
      }
      if (s.whole())
        store(out + c, x, columns - c);
      else
        reinterpret_cast<float4&>(partial[c]) = {x[0], x[1], x[2], x[3]};
    }
    if (threadIdx.x % kSharing != 0 || first != 0) return;
    if (s.whole())
      static_cast<float*>(p.lse.data)[token * p.lse.row + at.head] = weights.lse;
    else
      p.partial_lse[p.schedule.partial_lse(team, kv_head, s.first, m0 + r)] = weights.lse;
  }
};

template <size_t kRow>
__global__ void __launch_bounds__(PagedDecode<kRow>::kThreads, PagedDecode<kRow>::kMinBlocks)
    paged_decode_kernel(const __grid_constant__ PagedDecodeParams p) {
  ptx::follow_earlier_grids();
  extern __shared__ __align__(1024) char smem_raw[];
  PagedDecode<kRow>(p, *reinterpret_cast<typename PagedDecode<kRow>::SmemPlan*>(smem_raw)).run();
}

}  // namespace flashbpt::sm80
