// Which scores of a fragment dropout keeps. The layout of the words: philox.h.
#pragma once

#include "../params.h"
#include "philox.h"
#include "sequence.h"

namespace flashbpt {

// What the draws of a sequence share. Reads the state from memory: nothing is drawn where there is
// no dropout.
struct Dropout {
  uint64_t seed;
  uint32_t offset;
  uint32_t batch_head;  // of head 0 of the call
  uint32_t q_origin;
  uint32_t k_origin;
  uint32_t highest_dropped;  // of the words

  Dropout() = default;
  __device__ Dropout(const AttentionParams& p, const Sequence& seq)
      : seed(static_cast<uint64_t>(p.rng_state[0])),
        offset(static_cast<uint32_t>(p.rng_state[1])),
        batch_head(
            static_cast<uint32_t>((seq.batch + p.batch_offset) * p.total_heads + p.head_offset)),
        q_origin(static_cast<uint32_t>(seq.q_origin)),
        k_origin(static_cast<uint32_t>(seq.k_origin)),
        highest_dropped(static_cast<uint32_t>(p.dropout_threshold - 1)) {}
};

// What dropout keeps of a fragment of 16 kM rows x 8 kN columns, a bit a score of this lane.
template <int kM, int kN>
class KeptBits {
 public:
  static constexpr int kPieces = kM * kN / 2;  // of 16 x 16; those of the same columns in a row
  static constexpr int kWords = (kPieces + 3) / 4;

  // Pieces in ascending order: the first of four clears their word.
  __device__ void set(int piece, uint32_t bits) {
    if (piece % 4 == 0) bits_[piece / 4] = 0;
    bits_[piece / 4] |= bits << (piece % 4 * 8);
  }
  // Four pieces at once, behind those that came before.
  __device__ void append_word(uint32_t bits) {
#pragma unroll
    for (int word = 0; word + 1 < kWords; ++word) bits_[word] = bits_[word + 1];
    bits_[kWords - 1] = bits;
  }
  __device__ bool operator()(int m, int n, int i) const {
    const int piece = n / 2 * kM + m;
    return bits_[piece / 4] >> (piece % 4 * 8 + bit(n % 2, i)) & 1;
  }
  // Elements {0, 1} + 2 row_half of the columns n as two halves of a word: ones where kept.
  __device__ uint32_t halves(int n, int row_half) const {
    static_assert(kM == 1);
    const uint32_t bits = bits_[n / 2 / 4] >> (n / 2 % 4 * 8);
    return (bits >> bit(n % 2, 2 * row_half) & 1) * 0xffffu |
           (bits >> bit(n % 2, 2 * row_half + 1) & 1) * 0xffff0000u;
  }
  // Of a piece's eight: element i of the half of its columns.
  static constexpr int bit(int half, int i) { return i % 2 * 4 + i / 2 * 2 + half; }

 private:
  uint32_t bits_[kWords];
};

// The draws of such a fragment.
template <int kM, int kN>
class DropoutTile {
 public:
  using Kept = KeptBits<kM, kN>;

  // (row, col): this lane's first element, in the sequence; head: within the call.
  __device__ DropoutTile(const Dropout& dropout, int head, int row, int col)
      : keys_(dropout.seed),
        offset_(dropout.offset),
        batch_head_(dropout.batch_head + head),
        q_(dropout_counter(dropout.q_origin + row)),
        k_(dropout_counter(dropout.k_origin + col)),
        highest_dropped_(dropout.highest_dropped) {}

  // Bit Kept::bit(half, i) is set where element i is kept.
  __device__ uint32_t draw(int piece) const {
    const uint32_t q = q_ + 8 * (piece % kM), k = k_ + 8 * (piece / kM);
    uint32_t bits = 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const PhiloxWords words = philox4x32_7(keys_, {{offset_, batch_head_, q, k + c}});
#pragma unroll
      for (int i = 0; i < 4; ++i) bits |= uint32_t{words.word[i] > highest_dropped_} << (4 * c + i);
    }
    return bits;
  }
  // All of it, in little code: four pieces side by side, since each waits for its last round.
  __device__ void draw_all(Kept& kept) const {
#pragma unroll 1
    for (int first = 0; first < 4 * Kept::kWords; first += 4) {
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) bits |= draw(first + i) << (8 * i);
      kept.append_word(bits);
    }
  }
  // The share of one of `steps` steps.
  __device__ void draw_share(Kept& kept, int step, int steps) const {
#pragma unroll
    for (int i = 0; i < Kept::kPieces; ++i)
      if (i >= step * Kept::kPieces / steps && i < (step + 1) * Kept::kPieces / steps)
        kept.set(i, draw(i));
  }

 private:
  PhiloxKeys keys_;
  uint32_t offset_;
  uint32_t batch_head_;
  uint32_t q_;
  uint32_t k_;
  uint32_t highest_dropped_;
};

}  // namespace flashbpt
