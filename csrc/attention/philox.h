// Philox4x32-7 and the dropout layout that every backend shares.
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
// One call gives the four words of {q, q + 8} x {k, k + 8}, which one lane owns both in the forward
// fragment and in the transposed backward:
//   key     = (seed low, seed high)
//   counter = (offset low, batch * total_heads + head, (q / 16) * 8 + q % 8, (k / 16) * 8 + k % 8)
//   word 2 * ((q / 8) % 2) + (k / 8) % 2 belongs to (q, k); the key stays where word >= threshold.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flashbpt {

struct PhiloxWords {
  uint32_t word[4];
};

// The keys of all rounds, which every call with one seed shares.
struct PhiloxKeys {
  static constexpr int kRounds = 7;
  uint32_t key[kRounds][2];

  FLASHBPT_HOST_DEVICE explicit PhiloxKeys(uint64_t seed) {
    for (int round = 0; round < kRounds; ++round) {
      key[round][0] = static_cast<uint32_t>(seed) + round * 0x9E3779B9u;
      key[round][1] = static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u;
    }
  }
};

constexpr uint64_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;

FLASHBPT_HOST_DEVICE inline PhiloxWords philox_round(const PhiloxWords& c,
                                                     const uint32_t (&key)[2]) {
  const uint64_t p0 = kPhiloxMultiplier0 * c.word[0];
  const uint64_t p1 = kPhiloxMultiplier1 * c.word[2];
  return {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ key[0], static_cast<uint32_t>(p1),
           static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ key[1], static_cast<uint32_t>(p0)}};
}

FLASHBPT_HOST_DEVICE inline PhiloxWords philox4x32_7(const PhiloxKeys& keys, PhiloxWords c) {
  for (const uint32_t (&key)[2] : keys.key) c = philox_round(c, key);
  return c;
}

// What the counter holds of query or key i: 16 more are 8 more here.
FLASHBPT_HOST_DEVICE inline uint32_t dropout_counter(uint32_t i) {
  return (i / 16) * 8 + i % 8;
}

// The four words that hold (q, k); only q / 16, q % 8, k / 16 and k % 8 matter.
FLASHBPT_HOST_DEVICE inline PhiloxWords dropout_words(uint64_t seed, uint64_t offset,
                                                      uint32_t batch_head, uint32_t q, uint32_t k) {
  return philox4x32_7(PhiloxKeys(seed), {{static_cast<uint32_t>(offset), batch_head,
                                          dropout_counter(q), dropout_counter(k)}});
}

}  // namespace flashbpt
