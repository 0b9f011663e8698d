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

FLASHBPT_HOST_DEVICE inline PhiloxWords philox4x32_7(uint32_t key0, uint32_t key1, PhiloxWords c) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u;
  constexpr uint32_t kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u;
  constexpr uint32_t kWeyl1 = 0xBB67AE85u;
  for (int round = 0; round < 7; ++round) {
    const uint64_t p0 = uint64_t{kMultiplier0} * c.word[0];
    const uint64_t p1 = uint64_t{kMultiplier1} * c.word[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ key0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ key1, static_cast<uint32_t>(p0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
}

// The four words that hold (q, k); only q / 16, q % 8, k / 16 and k % 8 matter.
FLASHBPT_HOST_DEVICE inline PhiloxWords dropout_words(uint64_t seed, uint64_t offset,
                                                      uint32_t batch_head, uint32_t q, uint32_t k) {
  const PhiloxWords counter = {
      {static_cast<uint32_t>(offset), batch_head, (q / 16) * 8 + q % 8, (k / 16) * 8 + k % 8}};
  return philox4x32_7(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), counter);
}

}  // namespace flashbpt
