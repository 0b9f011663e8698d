// The sequences of a call: every batch element of a dense one, every pair of a packed one.
#pragma once

#include <vector>

#include "../attention/sequence.h"

namespace flashbpt::cpu {

inline std::vector<Sequence> sequences_of(const AttentionParams& p) {
  std::vector<Sequence> out;
  out.reserve(p.batch);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, b);
    if (!p.packed() || s.len_q > 0) out.push_back(s);
  }
  return out;
}

}  // namespace flashbpt::cpu
