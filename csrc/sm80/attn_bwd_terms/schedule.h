// What one block of the kernel of the terms' gradients owns and visits.
#pragma once

#include "../attn_bwd/schedule.h"
#include "config.h"

namespace flashbpt::sm80 {

// How many tiles there are along each dimension.
struct TileCounts {
  uint32_t batch, head, row, col;
};

// The gradient of a term, dmask or dalibi, is cut into pieces of one tile. Along a dimension over
// which the term is broadcast there is one piece, to which all tiles of the scores are added; along
// the others there is one a tile.
struct AttnBwdTermsKernelParams : AttnBwdKernelParams {
  TensorView grad;         // row and col 0 where a piece is one element along them
  int64_t partial_stride;  // of dalibi, from one piece along the columns to the next; else 0
  bool of_alibi;
  bool grad_pairs;  // two neighbours of a row are aligned to 8 bytes
  TileCounts pieces;
  TileCounts sums;  // tiles of the scores that are added to one piece; pieces * sums are all
  uint32_t splits;  // blocks that share the visits of a piece; more than 1 add atomically

  // (batch, head, key tile)s that a piece is added up over. The rows of each come on top.
  FLASHBPT_HOST_DEVICE uint32_t visits() const { return sums.batch * sums.head * sums.col; }
  FLASHBPT_HOST_DEVICE int64_t blocks() const {
    return int64_t{pieces.batch} * pieces.head * pieces.row * pieces.col * splits;
  }
};

struct TermsBlock {
  uint32_t batch, head, row,
      col;  // the piece, which is the first tile of the scores that it visits
  uint32_t visit_begin, visit_end;
};

__device__ inline TermsBlock find_terms_block(const AttnBwdTermsKernelParams& p, uint32_t index) {
  TermsBlock block;
  const auto take = [&](uint32_t count) {
    const uint32_t at = index % count;
    index /= count;
    return at;
  };
  const uint64_t visits = p.visits(), split = take(p.splits);
  block.visit_begin = static_cast<uint32_t>(visits * split / p.splits);
  block.visit_end = static_cast<uint32_t>(visits * (split + 1) / p.splits);
  block.row = take(p.pieces.row);  // neighbours share keys
  block.col = take(p.pieces.col);
  block.head = take(p.pieces.head);
  block.batch = take(p.pieces.batch);
  return block;
}

// One visit: a tile of keys, and the query tiles that see it. The whole warp calls it.
template <int kBlockQ, int kBlockK>
__device__ BwdPlace find_terms_place(const AttnBwdTermsKernelParams& p, const TermsBlock& block,
                                     uint32_t visit) {
  int64_t tile = block.col + visit % p.sums.col;
  visit /= p.sums.col;
  const uint32_t head = block.head + visit % p.sums.head;
  BwdPlace place;
  place.empty = false;
  if (p.packed()) {
    const SequenceTile found = find_key_tile(p, tile, kBlockK);
    place.seq = found.seq;
    place.empty = found.empty;
    tile = found.tile;
  } else {
    place.seq = sequence_of(p, block.batch + visit / p.sums.head);
  }
  place.kv_head = head / p.group_heads;
  place.head_end = head + 1;
  place.slice = 0;
  place.padded_begin = padded_row_begin(p, place.seq);
  const int64_t k0 = tile * kBlockK;
  place.k0 = static_cast<int>(k0);
  const KeyRange rows = rows_that_see(p.band, place.seq.shift, place.seq.len_q, k0,
                                      min(k0 + kBlockK, place.seq.len_k));
  const int64_t row = block.row, row_end = row + p.sums.row;
  const int64_t begin = rows.begin / kBlockQ, end = (rows.end + kBlockQ - 1) / kBlockQ;
  place.tile_begin = static_cast<int>(max(begin, row));
  place.tile_end = rows.empty() ? 0 : static_cast<int>(min(end, row_end));
  find_full_tiles<kBlockQ, kBlockK>(p.band, place);
  return place;
}

}  // namespace flashbpt::sm80
