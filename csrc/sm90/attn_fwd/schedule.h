// What a block of the Hopper forward works on, one piece after the other.
#pragma once

#include <cuda.h>

#include "../../attention/dropout.h"
#include "../../attention/find_sequence.h"
#include "../../attention/mask_tiles.h"
#include "../../attention/mask_window.h"
#include "../../attention/paged_keys.h"
#include "../../attention/score_terms.h"
#include "../../attention/score_unit.h"
#include "../../attention/tile_order.h"
#include "config.h"

namespace flashbpt::sm90 {

// The keys that the rows of a sequence see, in 32 bits: of row q those of [q + low, q + high) that
// there are.
struct RowKeys {
  static constexpr int kFar = (1 << 30) - 1024;  // lengths are less

  int low, high, len_k;
  int diagonal;  // row q meets key q + this, if it is near

  static FLASHBPT_HOST_DEVICE RowKeys of(const Band& band, const Sequence& seq) {
    return {near(seq.shift - band.left), near(seq.shift + band.right + 1),
            static_cast<int>(seq.len_k), near(seq.shift)};
  }
  FLASHBPT_HOST_DEVICE int begin(int q) const { return clamp(q + low); }
  FLASHBPT_HOST_DEVICE int end(int q) const { return clamp(q + high); }

 private:
  FLASHBPT_HOST_DEVICE int clamp(int k) const { return k < 0 ? 0 : k > len_k ? len_k : k; }
  static FLASHBPT_HOST_DEVICE int near(int64_t x) {
    return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x);
  }
};

// From a head or batch element to the next one, in coordinates of a tensor map: 0 where the
// dimension is broadcast, or packed away.
struct MapSteps {
  int head, batch;

  static MapSteps of(const TensorView& t) { return {t.head != 0, t.batch != 0}; }
};

// Pages, and how they are copied.
struct PageCopies : KeyPages {
  int box_keys = 0;  // keys of a page that the copy engine brings at once; 0: rows are gathered
  int warps = 0;     // that copy

  FLASHBPT_HOST_DEVICE bool gathers() const { return box_keys == 0; }
  // What arrives when a stage is filled: a thread of each warp, or all.
  FLASHBPT_HOST_DEVICE int arrivals() const { return gathers() ? 32 * warps : warps; }
};

struct AttnFwdKernelParams : AttentionParams {
  CUtensorMap q_map, k_map, v_map;  // boxes of 64 columns x 64, block_k or box_keys rows
  CUtensorMap bias_map;             // of an additive mask, 64 x 64
  MapSteps q_steps, k_steps, v_steps, bias_steps;
  PageCopies pages;
  TileOrder order;      // packed: of room for tiles (attention/find_sequence.h)
  int cached_keys;      // packed: of all heads together, that a third of the L2 cache holds
  Divisor heads;        // of queries
  Divisor group_heads;  // query heads of a kv head
  RowKeys keys;         // dense
  ScoreUnit score;
  float scale_fp32, cap, cap_unit;  // scale, softcap (0: none), their ratio
  float slope_unit;                 // of ALiBi's slopes, in that of the scores
  MaskTiles mask_tiles;             // data is null without a boolean mask
  // Two words that are zero before the launch and after it: pieces handed out beyond the first of
  // each block, and blocks that have ended.
  int32_t* counters;
};

// A tile of query rows of one head, and its tiles of keys.
struct Work {
  int batch, head, kv_head;
  int q_begin, k_begin;  // of the sequence, in q and in k
  int q0;                // first row, in the sequence
  int len_q;             // rows of the sequence
  RowKeys keys;
  int tile_begin, tile_end;
  int tile_first;            // that is done first
  int tiles;                 // that there are: a mask may leave some empty
  int seen_begin, seen_end;  // keys that every row sees
  float slope;               // of ALiBi; 0: none
  Dropout dropout;           // where there is dropout

  __device__ bool any() const { return batch >= 0; }
  // Whether tiles come from the first one on, up to the last one that a row sees.
  __device__ bool ascends() const { return tile_first == tile_begin; }
  // Tile number i without a mask: from tile_first down to tile_begin, then what is above
  // tile_first. Keys from the first on, unless ALiBi makes those at the diagonal the largest: the
  // reference is theirs.
  template <bool kTerms>
  __device__ int tile(int i) const {
    if (!kTerms) return tile_begin + i;
    return i <= tile_first - tile_begin ? tile_first - i : tile_begin + i;
  }
};

// Bits of a tile of keys under a boolean mask: 1 where any element is true, 2 where all are.
template <int kBlockQ, int kBlockK>
__device__ int mask_state(const AttnFwdKernelParams& p, int batch, int head, int q0, int tile) {
  return p.mask_tiles.state<kBlockQ / MaskTiles::kRows, kBlockK / MaskTiles::kCols>(
      batch, head, q0 / MaskTiles::kRows, tile * (kBlockK / MaskTiles::kCols), p.len_q, p.len_k);
}

// A request of a paged call, without rows where it is another kernel's.
__device__ inline Sequence request_of(const AttnFwdKernelParams& p, const Sequence& seq) {
  Sequence request = paged_sequence(p.pages, seq);
  if (request.len_q <= p.pages.few_rows) request.len_q = 0;
  return request;
}

struct PackedTile {
  Sequence seq;
  int head, tile;  // tile: of the sequence
};

// Work number `index` of a packed call: from the last tile of the last sequence to the first, all
// heads of a tile side by side. Where a sequence's keys of all heads exceed the cache, its heads go
// in sections, as in TileOrder.
template <int kBlockQ, bool kPages>
__device__ PackedTile packed_tile(const AttnFwdKernelParams& p, uint32_t index, int near) {
  const TileOrder::Place at = p.order.at(index);
  const SequenceTile found = find_query_tile_near(p, at.tile, kBlockQ, near);
  PackedTile packed{kPages ? request_of(p, found.seq) : found.seq, static_cast<int>(at.head),
                    static_cast<int>(found.tile)};
  if (packed.seq.len_k * p.heads_kv <= p.cached_keys) return packed;
  // Room for tiles from `first` on, as find_sequence.h counts them.
  const int64_t b = packed.seq.batch;
  const uint32_t first = at.tile - packed.tile, heads = p.order.heads.value();
  const uint32_t end =
      b + 1 < p.batch
          ? min(static_cast<uint32_t>(block_begin(p, b + 1) / kBlockQ + b + 1), p.order.tiles)
          : p.order.tiles;
  const uint32_t tiles = end - first, group = p.group_heads.value();
  // At least four works a block, lest the last section's long ones end late.
  const uint32_t fit = p.cached_keys / static_cast<uint32_t>(packed.seq.len_k) * group;
  const uint32_t section =
      TileOrder::section_heads(heads, max(max(fit, group), 4 * gridDim.x / tiles + 1), group);
  uint32_t rest = index - heads * (p.order.tiles - end);
  const uint32_t head = rest / (section * tiles) * section;
  rest -= head * tiles;
  const uint32_t here = min(section, heads - head);
  packed.head = static_cast<int>(head + rest % here);
  packed.tile = static_cast<int>(tiles - 1 - rest / here);
  return packed;
}

// Fills `work`, in shared memory: by the thread that `writes`, with masks helped by its warp.
// sequence: the last one that was found in a packed call.
template <int kBlockQ, int kBlockK, Extras kExtras>
__device__ void find_work(const AttnFwdKernelParams& p, uint32_t index, int& sequence, Work& work,
                          bool writes) {
  constexpr bool kTerms = has_terms(kExtras), kMasks = has_masks(kExtras);
  constexpr bool kDropout = kExtras == Extras::kAll, kPages = kExtras == Extras::kPages;
  int batch, head, q0, len_q = static_cast<int>(p.len_q);
  RowKeys keys = p.keys;
  if (kPages || p.packed()) {
    const PackedTile found = packed_tile<kBlockQ, kPages>(p, index, sequence);
    const bool empty = found.tile < 0 || int64_t{found.tile} * kBlockQ >= found.seq.len_q;
    batch = static_cast<int>(found.seq.batch);
    if (writes) sequence = batch;
    head = found.head;
    q0 = empty ? 0 : found.tile * kBlockQ;
    len_q = empty ? 0 : static_cast<int>(found.seq.len_q);
    keys = RowKeys::of(p.band, found.seq);
    if (writes) {
      work.q_begin = static_cast<int>(found.seq.q_begin);
      work.k_begin = static_cast<int>(found.seq.k_begin);
      if (kDropout && p.dropout_threshold > 0) work.dropout = Dropout(p, found.seq);
    }
  } else {
    const TileOrder::Place at = p.order.at(index);
    q0 = static_cast<int>(at.tile) * kBlockQ;
    batch = static_cast<int>(p.heads.quotient(at.head));
    head = static_cast<int>(p.heads.remainder(at.head));
    if (writes) {
      work.q_begin = work.k_begin = 0;
      if (kDropout && p.dropout_threshold > 0) work.dropout = Dropout(p, sequence_of(p, batch));
    }
  }
  const int q_last = min(q0 + kBlockQ, len_q) - 1;
  const int tile_begin = keys.begin(q0) / kBlockK;
  const int tile_end =
      len_q == 0 ? tile_begin : max((keys.end(q_last) + kBlockK - 1) / kBlockK, tile_begin);
  int tile_first = tile_begin, tiles = tile_end - tile_begin;
  float slope = 0.0f;
  if (kTerms && p.alibi) {
    slope = static_cast<const float*>(p.alibi.data)[batch * p.alibi.batch + head];
    tile_first = max(min((q_last + keys.diagonal) / kBlockK, tile_end - 1), tile_begin);
  }
  if (kMasks && p.mask_tiles.data != nullptr) {
    tile_first = tile_begin;
    tiles = 0;
    for (int first = tile_begin; first < tile_end; first += 32) {
      const int tile = first + static_cast<int>(threadIdx.x % 32);
      const bool any =
          tile < tile_end && (mask_state<kBlockQ, kBlockK>(p, batch, head, q0, tile) & 1);
      tiles += __popc(__ballot_sync(~0u, any));
    }
  }
  if (!writes) return;
  work.batch = batch;
  work.head = head;
  work.kv_head = static_cast<int>(p.group_heads.quotient(head));
  work.q0 = q0;
  work.len_q = len_q;
  work.keys = keys;
  work.tile_begin = tile_begin;
  work.tile_end = tile_end;
  work.tile_first = tile_first;
  work.tiles = tiles;
  work.seen_begin = keys.begin(q_last);
  work.seen_end = keys.end(q0);
  work.slope = slope;
}

}  // namespace flashbpt::sm90
