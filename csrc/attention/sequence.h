// One sequence of a call: a batch element of a dense one, a pair of a packed one.
#pragma once

#include <cstdint>

#include "../params.h"
#include "host_device.h"

namespace flashbpt {

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

FLASHBPT_HOST_DEVICE inline int64_t cu_seqlen(const void* cu_seqlens, bool int64, int64_t i) {
  return int64 ? static_cast<const int64_t*>(cu_seqlens)[i]
               : static_cast<const int32_t*>(cu_seqlens)[i];
}

// Sequence b of the call. Packed: q holds the rows [q_offset, q_offset + len_q) of the batch that
// cu_seqlens describes, so a sequence may lie partly or wholly outside of it (len_q = 0).
FLASHBPT_HOST_DEVICE inline Sequence sequence_of(const AttentionParams& p, int64_t b) {
  if (!p.packed()) {
    return {b,          0,         p.len_q, 0, p.len_k, p.q_offset + p.diagonal - p.k_offset,
            p.q_offset, p.k_offset};
  }
  const int64_t first = cu_seqlen(p.cu_seqlens_q, p.cu_seqlens_int64, b);
  const int64_t last = cu_seqlen(p.cu_seqlens_q, p.cu_seqlens_int64, b + 1);
  const int64_t k_begin = cu_seqlen(p.cu_seqlens_k, p.cu_seqlens_int64, b);
  const int64_t len_k = cu_seqlen(p.cu_seqlens_k, p.cu_seqlens_int64, b + 1) - k_begin;
  const int64_t stop = p.q_offset + p.len_q;
  const int64_t begin = first > p.q_offset ? first : p.q_offset;
  const int64_t end = last < stop ? last : stop;
  const int64_t origin = begin - first;
  return {b,
          begin - p.q_offset,
          end > begin ? end - begin : 0,
          k_begin,
          len_k,
          len_k - (last - first) + origin,
          origin,
          0};
}

}  // namespace flashbpt
