// What one block of the forward works on.
#pragma once

#include "../../attention/find_sequence.h"
#include "../../attention/score_terms.h"
#include "../../attention/tile_order.h"
#include "../attn_params.h"
#include "../paged_keys.h"
#include "config.h"

namespace flashbpt::sm80 {

struct AttnFwdKernelParams : AttnFwdParams {
  static constexpr bool kPaged = false;
  RowAccess access;
  TileOrder order;
  Divisor heads;        // of queries
  Divisor group_heads;  // query heads of a kv head
  Divisor key_parts;    // splits
  int slices_qk;        // pieces of the tile's width that Q and K have
  Divisor slices_v;     // and V and O: one block each
  ScoreUnit score;
};

struct FwdPlace {
  Sequence seq;
  int head;
  int kv_head;
  int q0;  // first row, local to the sequence
  int slice;
  int split;
  int tile_begin;  // tiles of keys
  int tile_end;
  int seen_begin;  // keys that every row sees
  int seen_end;
  bool empty;
};

template <int kBlockQ, int kBlockK, typename Params>
__device__ FwdPlace find_fwd_place(const Params& p, uint32_t index) {
  const uint32_t splits = p.splits.count;
  FwdPlace place;
  place.slice = p.slices_v.remainder(index);
  index = p.slices_v.quotient(index);
  place.split = p.key_parts.remainder(index);
  const TileOrder::Place at = p.order.at(p.key_parts.quotient(index));
  int64_t tile = at.tile;
  place.empty = false;
  if (p.packed()) {
    const SequenceTile found = find_query_tile(p, tile, kBlockQ);
    place.seq = found.seq;
    place.head = at.head;
    place.empty = found.empty;
    tile = found.tile;
    if constexpr (Params::kPaged) {
      place.seq = paged_sequence(p.pages, place.seq);
      place.empty |= place.seq.len_q <= p.pages.few_rows;
    }
  } else {
    place.seq = sequence_of(p, p.heads.quotient(at.head));
    place.head = p.heads.remainder(at.head);
  }
  place.kv_head = p.group_heads.quotient(place.head);
  const int64_t q0 = tile * kBlockQ;
  const int64_t left = place.seq.len_q - q0;
  const int64_t q_end = q0 + (left < kBlockQ ? left : kBlockQ);
  place.q0 = static_cast<int>(q0);
  const KeyRange keys = p.band.of_rows(q0, q_end, place.seq.shift, place.seq.len_k);
  const KeyRange seen = seen_by_all(p.band, place.seq.shift, place.seq.len_k, q0, q_end);
  place.seen_begin = static_cast<int>(seen.begin);
  place.seen_end = static_cast<int>(seen.end);
  const uint32_t first = static_cast<uint32_t>(keys.begin) / kBlockK;
  const uint32_t last = keys.empty() ? first : static_cast<uint32_t>(keys.end - 1) / kBlockK + 1;
  const uint32_t share = p.key_parts.quotient(last - first + splits - 1);
  const uint32_t begin = first + place.split * share;
  place.tile_begin = begin < last ? begin : last;
  place.tile_end = begin + share < last ? begin + share : last;
  return place;
}

}  // namespace flashbpt::sm80
