// What a block of the Hopper forward works on, one piece after the other.
#pragma once

#include <cuda.h>

#include "../../attention/score_terms.h"
#include "../../attention/score_unit.h"
#include "../../attention/tile_order.h"

namespace flashbpt::sm90 {

struct AttnFwdKernelParams : AttentionParams {
  CUtensorMap q_map, k_map, v_map;  // boxes of 64 columns x block_q or block_k rows
  TileOrder order;
  Divisor heads;        // of queries
  Divisor group_heads;  // query heads of a kv head
  ScoreUnit score;
  // Two words that are zero before the launch and after it: pieces handed out beyond the first of
  // each block, and blocks that have ended.
  int32_t* counters;
};

// A tile of query rows of one head, and its tiles of keys.
struct Work {
  int batch, head, kv_head;
  int q0;  // first row
  int tile_begin, tile_end;
  int seen_begin, seen_end;  // keys that every row sees

  static __device__ Work none() { return {-1}; }
  __device__ bool any() const { return batch >= 0; }
  __device__ bool empty() const { return tile_begin >= tile_end; }
};

template <int kBlockQ, int kBlockK>
__device__ Work find_work(const AttnFwdKernelParams& p, uint32_t index) {
  const TileOrder::Place at = p.order.at(index);
  const Sequence seq = sequence_of(p, p.heads.quotient(at.head));
  const int64_t q0 = int64_t{at.tile} * kBlockQ;
  const int64_t q_end = q0 + kBlockQ < seq.len_q ? q0 + kBlockQ : seq.len_q;
  const KeyRange keys = p.band.of_rows(q0, q_end, seq.shift, seq.len_k);
  const KeyRange seen = seen_by_all(p.band, seq.shift, seq.len_k, q0, q_end);
  const int head = p.heads.remainder(at.head);
  const int begin = static_cast<int>(keys.begin / kBlockK);
  return {static_cast<int>(seq.batch),
          head,
          static_cast<int>(p.group_heads.quotient(head)),
          static_cast<int>(q0),
          begin,
          keys.empty() ? begin : static_cast<int>((keys.end - 1) / kBlockK) + 1,
          static_cast<int>(seen.begin),
          static_cast<int>(seen.end)};
}

}  // namespace flashbpt::sm90
