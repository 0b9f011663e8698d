// The sequences of a call: every batch element of a dense one, every pair of a packed one.
#pragma once

#include <algorithm>
#include <vector>

#include "../params.h"

namespace flashbpt::cpu {

struct Sequence {
  int64_t batch;    // index for strides, masks, slopes and dropout
  int64_t q_begin;  // first row in q
  int64_t len_q;
  int64_t k_begin;  // first row in k and v
  int64_t len_k;
  int64_t shift;     // diagonal: local row q and local key k meet at k = q + shift
  int64_t q_origin;  // dropout counts rows from here
  int64_t k_origin;  // and keys from here
};

inline int64_t cu_seqlen(const void* cu_seqlens, bool int64, int64_t i) {
  return int64 ? static_cast<const int64_t*>(cu_seqlens)[i]
               : static_cast<const int32_t*>(cu_seqlens)[i];
}

inline std::vector<Sequence> sequences_of(const AttentionParams& p) {
  std::vector<Sequence> out;
  out.reserve(p.batch);
  for (int64_t b = 0; b < p.batch; ++b) {
    if (!p.packed()) {
      out.push_back({b, 0, p.len_q, 0, p.len_k, p.q_offset + p.diagonal - p.k_offset, p.q_offset,
                     p.k_offset});
      continue;
    }
    // q holds the rows [q_offset, q_offset + len_q) of the packed batch.
    const int64_t first = cu_seqlen(p.cu_seqlens_q, p.cu_seqlens_int64, b);
    const int64_t last = cu_seqlen(p.cu_seqlens_q, p.cu_seqlens_int64, b + 1);
    const int64_t k_begin = cu_seqlen(p.cu_seqlens_k, p.cu_seqlens_int64, b);
    const int64_t k_end = cu_seqlen(p.cu_seqlens_k, p.cu_seqlens_int64, b + 1);
    const int64_t begin = std::max(first, p.q_offset);
    const int64_t end = std::min(last, p.q_offset + p.len_q);
    if (begin >= end) continue;
    const int64_t origin = begin - first, len_k = k_end - k_begin;
    out.push_back({b, begin - p.q_offset, end - begin, k_begin, len_k,
                   len_k - (last - first) + origin, origin, 0});
  }
  return out;
}

}  // namespace flashbpt::cpu
