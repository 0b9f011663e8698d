// Which scores of a fragment dropout keeps. The layout of the words: philox.h.
#pragma once

#include "../params.h"
#include "philox.h"
#include "sequence.h"

namespace flashbpt {

class Dropout {
 public:
  // head: of the query, within the call.
  __device__ Dropout(const AttentionParams& p, const Sequence& seq, int64_t head)
      : on(p.dropout_threshold > 0), drops_all_(p.drops_all()) {
    if (!on) return;
    seed_ = static_cast<uint64_t>(p.rng_state[0]);
    offset_ = static_cast<uint64_t>(p.rng_state[1]);
    threshold_ = static_cast<uint32_t>(p.dropout_threshold);
    batch_head_ =
        static_cast<uint32_t>((seq.batch + p.batch_offset) * p.total_heads + head + p.head_offset);
    q_origin_ = static_cast<uint32_t>(seq.q_origin);
    k_origin_ = static_cast<uint32_t>(seq.k_origin);
  }

  // Of the piece of 16 rows x 16 columns whose first 8 rows and columns hold (row, col) and
  // (row, col + 1): bit 4 h + 2 r + c is set where (row + 8 r, col + c + 8 h) is kept.
  __device__ uint32_t kept(int row, int col) const {
    if (drops_all_) return 0;
    uint32_t bits = 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const PhiloxWords words =
          dropout_words(seed_, offset_, batch_head_, q_origin_ + row, k_origin_ + col + c);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        bits |= uint32_t{words.word[i] >= threshold_} << (i % 2 * 4 + i / 2 * 2 + c);
    }
    return bits;
  }

  bool on;

 private:
  bool drops_all_;
  uint64_t seed_ = 0;
  uint64_t offset_ = 0;
  uint32_t threshold_ = 0;
  uint32_t batch_head_ = 0;
  uint32_t q_origin_ = 0;
  uint32_t k_origin_ = 0;
};

}  // namespace flashbpt
