// Which sequence of a packed call a block of threads works on, found on the device: the host knows
// only how many tokens and sequences there are.
//
// Tiles of `size` rows never straddle sequences, and sequence b numbers its own from
//
//   first_tile(b) = begin_b / size + b
//
// without a prefix sum: between first_tile(b) and first_tile(b + 1) there is room for
// ceil(len_b / size) tiles, at most one of them is void, and ceil(tokens / size) + batch hold all.
// Padded rows (sm80/attn_params.h) are such tiles of kRowPad rows.
#pragma once

#include "sequence.h"

namespace flashbpt {

struct SequenceTile {
  Sequence seq;
  int64_t tile;  // counted from the start of the sequence
  bool empty;    // no row of the sequence lies in it
};

// The last sequence with first_tile <= tile, by all 32 lanes of a warp together: each probes one of
// 32 candidates, so that up to 32 sequences take one trip to memory and 32768 take three.
// begin(b): first row of sequence b, not decreasing.
template <typename Begin>
__device__ int64_t find_sequence(int64_t batch, Begin begin, int64_t tile, int size) {
  const int lane = threadIdx.x % 32;
  int64_t first = 0;
  for (int64_t count = batch; count > 1;) {
    const int64_t step = (count + 31) / 32;
    const int64_t b = first + lane * step;
    // begin / size + b <= tile
    const bool reached = lane * step < count && begin(b) < (tile - b + 1) * size;
    const int last = max(__popc(__ballot_sync(~0u, reached)) - 1, 0);
    first += last * step;
    count = min(step, count - last * step);
  }
  return first;
}

// The same by each thread for itself, from a sequence that is likely near.
template <typename Begin>
__device__ int64_t find_sequence_near(int64_t batch, Begin begin, int64_t tile, int size,
                                      int64_t near) {
  const auto reached = [&](int64_t b) { return begin(b) < (tile - b + 1) * size; };
  // Steps that double, to both sides of where it changes; then halves.
  int64_t low = near, high = near + 1, step = 1;
  for (; low > 0 && !reached(low); step *= 2) high = low, low = max(low - step, int64_t{0});
  for (; high < batch && reached(high); step *= 2) low = high, high = min(high + step, batch);
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (reached(middle) ? low : high) = middle;
  }
  return low;
}

// First row of sequence b in a block of rows (q_offset). Sequences that end before the block begins
// start with it, and hold none of it.
__device__ inline int64_t block_begin(const AttentionParams& p, int64_t b) {
  return max(cu_seqlen(p.cu_seqlens_q, p.cu_seqlens_int64, b) - p.q_offset, int64_t{0});
}
__device__ inline SequenceTile query_tile_of(const Sequence& seq, int64_t tile, int size) {
  const int64_t local = tile - (seq.q_begin / size + seq.batch);
  return {seq, local, local < 0 || local * size >= seq.len_q};
}

// The tile of query rows, of those that a block of rows (q_offset) holds. Packed calls; the whole
// warp calls it, threads along x.
__device__ inline SequenceTile find_query_tile(const AttentionParams& p, int64_t tile, int size) {
  const auto begin = [&](int64_t b) { return block_begin(p, b); };
  return query_tile_of(sequence_of(p, find_sequence(p.batch, begin, tile, size)), tile, size);
}
// The same by each thread for itself, from a sequence that is likely near.
__device__ inline SequenceTile find_query_tile_near(const AttentionParams& p, int64_t tile,
                                                    int size, int64_t near) {
  const auto begin = [&](int64_t b) { return block_begin(p, b); };
  return query_tile_of(sequence_of(p, find_sequence_near(p.batch, begin, tile, size, near)), tile,
                       size);
}

// The tile of keys, likewise.
__device__ inline SequenceTile find_key_tile(const AttentionParams& p, int64_t tile, int size) {
  const auto begin = [&](int64_t b) { return cu_seqlen(p.cu_seqlens_k, p.cu_seqlens_int64, b); };
  const Sequence seq = sequence_of(p, find_sequence(p.batch, begin, tile, size));
  const int64_t local = tile - (seq.k_begin / size + seq.batch);
  return {seq, local, local < 0 || local * size >= seq.len_k};
}

}  // namespace flashbpt
