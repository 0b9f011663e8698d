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

  // Pieces in ascending order: the first of four clears their word.
  __device__ void set(int piece, uint32_t bits) {
    if (piece % 4 == 0) bits_[piece / 4] = 0;
    bits_[piece / 4] |= bits << (piece % 4 * 8);
  }
  __device__ bool operator()(int m, int n, int i) const {
    const int piece = n / 2 * kM + m;
    return bits_[piece / 4] >> (piece % 4 * 8 + bit(n % 2, i)) & 1;
  }
  // Of a piece's eight: element i of the half of its columns.
  static constexpr int bit(int half, int i) { return i % 2 * 4 + i / 2 * 2 + half; }

 private:
  uint32_t bits_[(kPieces + 3) / 4];
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

// Draws for a lane that has one pair of rows of a sequence, q and q + 8, and many columns. Of the
// eight products of the first four rounds, four do not depend on the column: they are made once.
class DropoutRows {
 public:
  // (row, col): this lane's first element, in the sequence; head: within the call.
  __device__ DropoutRows(const Dropout& dropout, int head, int row, int col)
      : keys_(dropout.seed),
        k_(dropout_counter(dropout.k_origin + col)),
        highest_dropped_(dropout.highest_dropped) {
    const auto& key = keys_.key;
    const uint32_t q = dropout_counter(dropout.q_origin + row);
    const Product offset(kPhiloxMultiplier0 * dropout.offset), rows(kPhiloxMultiplier1 * q);
    first_ = offset.high ^ key[0][1];
    second_ = rows.low ^ key[1][0];
    const Product p0(kPhiloxMultiplier0 * (rows.high ^ (dropout.batch_head + head) ^ key[0][0]));
    const Product p1(kPhiloxMultiplier1 * (p0.high ^ offset.low ^ key[1][1]));
    third_[0] = p1.high ^ key[2][0];
    third_[1] = p0.low ^ key[2][1];
    fourth_ = p1.low ^ key[3][0];
  }

  // The words of {q, q + 8} x {k, k + 8}, k: columns after the first one.
  __device__ PhiloxWords words(int k) const {
    const Product p1(kPhiloxMultiplier1 * (first_ ^ (k_ + k)));
    const Product p0(kPhiloxMultiplier0 * (p1.high ^ second_));
    const Product q0(kPhiloxMultiplier0 * (p1.low ^ third_[0]));
    const Product q1(kPhiloxMultiplier1 * (p0.high ^ third_[1]));
    PhiloxWords c = {{q1.high ^ fourth_, q1.low, q0.high ^ p0.low ^ keys_.key[3][1], q0.low}};
#pragma unroll
    for (int round = 4; round < PhiloxKeys::kRounds; ++round) c = philox_round(c, keys_.key[round]);
    return c;
  }

  // Weights of 16 bits, as operand a of a product: 0 where they are dropped.
  template <int kSteps>
  __device__ void drop(uint32_t (&p)[kSteps][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const PhiloxWords even = words(8 * step), odd = words(8 * step + 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = i % 2 * 2 + i / 2;  // of row q + 8 (i % 2), column k + 8 (i / 2)
        if (even.word[word] <= highest_dropped_) p[step][i] &= 0xffff0000u;
        if (odd.word[word] <= highest_dropped_) p[step][i] &= 0x0000ffffu;
      }
    }
  }

 private:
  struct Product {
    uint32_t high, low;

    __device__ explicit Product(uint64_t x)
        : high(static_cast<uint32_t>(x >> 32)), low(static_cast<uint32_t>(x)) {}
  };

  PhiloxKeys keys_;
  uint32_t k_;
  uint32_t highest_dropped_;
  uint32_t first_, second_, third_[2], fourth_;  // of rounds
};

}  // namespace flashbpt
