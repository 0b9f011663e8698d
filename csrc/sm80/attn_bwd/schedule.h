// What one block of the backward works on.
#pragma once

#include "../../attention/find_sequence.h"
#include "../../attention/mask_window.h"
#include "../../attention/score_terms.h"
#include "../../attention/tile_order.h"
#include "../attn_params.h"
#include "config.h"

namespace flashbpt::sm80 {

static_assert(AttnBwdConfig::kMostBlockQ <= kRowPad);

struct AttnBwdKernelParams : AttnBwdParams {
  RowAccess access;
  int access_grad_out;
  int access_dk;
  int access_dv;
  bool needs_ds;    // for some gradient but dV
  bool whole_rows;  // of Q and dO: as wide as the tile, aligned to 16 bytes, less than 64 GB
  uint32_t q_row_chunks, grad_out_row_chunks;  // then: 16 bytes each, from a row to the next
  uint32_t dq_pieces;                          // of dq_acc along the columns
  TileOrder order;                             // of key tiles
  Divisor kv_heads;
  Divisor row_parts;     // q_splits
  uint32_t group_heads;  // query heads of a kv head
  Divisor slices;        // pieces of the tile's width that the wider of Q and V has: one block each
  ScoreUnit score;
};

// A step: one tile of query rows of one head.
struct BwdStep {
  int head;
  int tile;
};

struct BwdPlace {
  Sequence seq;
  int kv_head;
  int head_end;  // of the query heads of the group; the first is kv_head * group
  int k0;        // first key, local to the sequence
  int slice;
  int tile_begin;  // tiles of query rows
  int tile_end;
  int full_begin;  // of these, tiles whose rows all see all keys of the block
  int full_end;
  int64_t padded_begin;  // first padded row of the sequence
  bool empty;
};

// Rows that see at least one of the keys [k_begin, k_end).
__device__ inline KeyRange rows_that_see(const Band& band, int64_t shift, int64_t len_q,
                                         int64_t k_begin, int64_t k_end) {
  // Row q sees [q + shift - left, q + shift + right]: the same band with its sides exchanged.
  Band mirrored;
  mirrored.left = band.right;
  mirrored.right = band.left;
  return mirrored.of_rows(k_begin, k_end, -shift, len_q);
}

// Tiles of query rows that need no hiding: every row sees the keys [k0, k0 + kBlockK).
template <int kBlockQ, int kBlockK>
__device__ void find_full_tiles(const Band& band, BwdPlace& place) {
  const Sequence& seq = place.seq;
  place.full_begin = place.full_end = 0;
  if (place.k0 + kBlockK > seq.len_k) return;
  // k0 + kBlockK - 1 <= q + shift + right and q + shift - left <= k0
  const int64_t first = place.k0 + kBlockK - 1 - seq.shift - band.right;
  const int64_t last = place.k0 - seq.shift + band.left;
  const int64_t begin = first > 0 ? (first + kBlockQ - 1) / kBlockQ : 0;
  const int64_t tiles = (seq.len_q + kBlockQ - 1) / kBlockQ;
  const int64_t end = last + 1 >= seq.len_q ? tiles : (last + 1 > 0 ? (last + 1) / kBlockQ : 0);
  place.full_begin = static_cast<int>(begin < tiles ? begin : tiles);
  place.full_end = static_cast<int>(end);
}

template <int kBlockQ, int kBlockK>
__device__ BwdPlace find_bwd_place(const AttnBwdKernelParams& p, uint32_t index) {
  const uint32_t splits = p.q_splits;
  BwdPlace place;
  place.slice = p.slices.remainder(index);
  index = p.slices.quotient(index);
  const uint32_t split = p.row_parts.remainder(index);
  const TileOrder::Place at = p.order.at(p.row_parts.quotient(index));
  int64_t tile = at.tile;
  place.empty = false;
  if (p.packed()) {
    const SequenceTile found = find_key_tile(p, tile, kBlockK);
    place.seq = found.seq;
    place.kv_head = at.head;
    place.empty = found.empty;
    tile = found.tile;
  } else {
    place.seq = sequence_of(p, p.kv_heads.quotient(at.head));
    place.kv_head = p.kv_heads.remainder(at.head);
  }
  place.head_end = (place.kv_head + 1) * p.group_heads;
  place.padded_begin = padded_row_begin(p, place.seq);
  const int64_t k0 = tile * kBlockK;
  const int64_t k_end = k0 + kBlockK < place.seq.len_k ? k0 + kBlockK : place.seq.len_k;
  place.k0 = static_cast<int>(k0);
  const KeyRange rows = rows_that_see(p.band, place.seq.shift, place.seq.len_q, k0, k_end);
  const uint32_t first = static_cast<uint32_t>(rows.begin) / kBlockQ;
  const uint32_t last = rows.empty() ? first : static_cast<uint32_t>(rows.end - 1) / kBlockQ + 1;
  const uint32_t share = p.row_parts.quotient(last - first + splits - 1);
  const uint32_t begin = first + split * share;
  place.tile_begin = begin < last ? begin : last;
  place.tile_end = begin + share < last ? begin + share : last;
  find_full_tiles<kBlockQ, kBlockK>(p.band, place);
  return place;
}

}  // namespace flashbpt::sm80
