// What a block of the Hopper forward works on, one piece after the other.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "../../attention/score_terms.h"
#include "../../attention/score_unit.h"
#include "../../attention/tile_order.h"

namespace flashbpt::sm90 {

// The keys that rows of a dense call see, in 32 bits: of row q those of [q + low, q + high) that
// there are.
struct RowKeys {
  static constexpr int kFar = 1 << 30;  // lengths are less

  int low, high, len_k;

  static RowKeys of(const AttentionParams& p) {
    const int64_t shift = sequence_of(p, 0).shift;
    const auto near = [](int64_t x) {
      return static_cast<int>(std::clamp<int64_t>(x, -kFar, kFar));
    };
    return {near(shift - p.band.left), near(shift + p.band.right + 1), static_cast<int>(p.len_k)};
  }
  __device__ int begin(int q) const { return min(max(q + low, 0), len_k); }
  __device__ int end(int q) const { return min(max(q + high, 0), len_k); }
};

struct AttnFwdKernelParams : AttentionParams {
  CUtensorMap q_map, k_map, v_map;  // boxes of 64 columns x block_q or block_k rows
  TileOrder order;
  Divisor heads;        // of queries
  Divisor group_heads;  // query heads of a kv head
  RowKeys keys;
  int diagonal_near;  // of ALiBi: row q meets key q + this
  ScoreUnit score;
  float scale_fp32, cap, cap_unit;  // of natural scores: scale, softcap (0: none), their ratio
  // Two words that are zero before the launch and after it: pieces handed out beyond the first of
  // each block, and blocks that have ended.
  int32_t* counters;
};

// A tile of query rows of one head, and its tiles of keys.
struct Work {
  int batch, head, kv_head;
  int q0;  // first row
  int tile_begin, tile_end;
  int tile_first;            // that is done first
  int seen_begin, seen_end;  // keys that every row sees
  float slope;               // of ALiBi; 0: none

  __device__ bool any() const { return batch >= 0; }
  __device__ int tiles() const { return tile_end - tile_begin; }
  // Tile number i: from tile_first down to tile_begin, then what is above tile_first. Keys from the
  // first on, unless ALiBi makes those at the diagonal the largest: the reference is theirs.
  template <bool kTerms>
  __device__ int tile(int i) const {
    if (!kTerms) return tile_begin + i;
    return i <= tile_first - tile_begin ? tile_first - i : tile_begin + i;
  }
};

// Fills `work`, in shared memory: the copying thread has few registers.
template <int kBlockQ, int kBlockK>
__device__ void find_work(const AttnFwdKernelParams& p, uint32_t index, Work& work) {
  const TileOrder::Place at = p.order.at(index);
  work.batch = static_cast<int>(p.heads.quotient(at.head));
  work.head = static_cast<int>(p.heads.remainder(at.head));
  work.kv_head = static_cast<int>(p.group_heads.quotient(work.head));
  const int q0 = static_cast<int>(at.tile) * kBlockQ;
  const int q_last = min(q0 + kBlockQ, static_cast<int>(p.len_q)) - 1;
  work.q0 = q0;
  work.tile_begin = p.keys.begin(q0) / kBlockK;
  work.tile_end = max((p.keys.end(q_last) + kBlockK - 1) / kBlockK, work.tile_begin);
  work.tile_first = work.tile_begin;
  work.seen_begin = p.keys.begin(q_last);
  work.seen_end = p.keys.end(q0);
  work.slope = 0;
  if (p.alibi) {
    work.slope = static_cast<const float*>(p.alibi.data)[work.batch * p.alibi.batch + work.head];
    const int diagonal = (q_last + p.diagonal_near) / kBlockK;
    work.tile_first = max(min(diagonal, work.tile_end - 1), work.tile_begin);
  }
}

}  // namespace flashbpt::sm90
