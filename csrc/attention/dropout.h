// Which scores of a fragment dropout keeps. The layout of the words: philox.h.
#pragma once

#include "../params.h"
#include "philox.h"
#include "sequence.h"

namespace flashbpt {

// Of one head. Reads the state from memory: nothing is drawn where there is no dropout.
class Dropout {
 public:
  // head: of the query, within the call.
  __device__ Dropout(const AttentionParams& p, const Sequence& seq, int64_t head)
      : keys_(static_cast<uint64_t>(p.rng_state[0])),
        offset_(static_cast<uint32_t>(p.rng_state[1])),
        batch_head_(static_cast<uint32_t>((seq.batch + p.batch_offset) * p.total_heads + head +
                                          p.head_offset)),
        q_origin_(static_cast<uint32_t>(seq.q_origin)),
        k_origin_(static_cast<uint32_t>(seq.k_origin)),
        threshold_(static_cast<uint32_t>(p.dropout_threshold)),
        possible_(p.drops_all() ? 0 : 0xffu) {}

  // Of the piece of 16 rows x 16 columns that is `m` and `n` pieces from the one whose first 8 rows
  // and columns hold (row, col) and (row, col + 1), col even: bit 4 h + 2 r + c is set where
  // (row + 8 r, col + c + 8 h) of that piece is kept.
  __device__ uint32_t kept(int row, int col, int m, int n) const {
    const uint32_t q = dropout_counter(q_origin_ + row) + 8 * m;
    const uint32_t k = dropout_counter(k_origin_ + col) + 8 * n;
    uint32_t bits = 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const PhiloxWords words = philox4x32_7(keys_, {{offset_, batch_head_, q, k + c}});
#pragma unroll
      for (int i = 0; i < 4; ++i)
        bits |= uint32_t{words.word[i] >= threshold_} << (i % 2 * 4 + i / 2 * 2 + c);
    }
    return bits & possible_;
  }

 private:
  PhiloxKeys keys_;
  uint32_t offset_;
  uint32_t batch_head_;
  uint32_t q_origin_;
  uint32_t k_origin_;
  uint32_t threshold_;
  uint32_t possible_;  // 0 where everything is dropped
};

// What dropout keeps of a fragment of 16 kM rows x 8 kN columns, a bit a score of this lane.
template <int kM, int kN>
class KeptBits {
 public:
  static constexpr int kPieces = kM * kN / 2;  // of 16 x 16

  // The share of one of `steps` steps. (row, col): this lane's first element.
  __device__ void draw_share(const Dropout& dropout, int step, int steps, int row, int col) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i < step * kPieces / steps || i >= (step + 1) * kPieces / steps) continue;
      if (i % 4 == 0) bits_[i / 4] = 0;
      bits_[i / 4] |= dropout.kept(row, col, i / (kN / 2), i % (kN / 2)) << (i % 4 * 8);
    }
  }
  __device__ bool operator()(int m, int n, int i) const {
    const int piece = m * (kN / 2) + n / 2;
    return bits_[piece / 4] >> (piece % 4 * 8 + n % 2 * 4 + i) & 1;
  }

 private:
  uint32_t bits_[(kPieces + 3) / 4];
};

}  // namespace flashbpt
