// Which keys a query row may see under causal and window: index arithmetic only.
//
//   key k is visible to row q  <=>  q + shift - left <= k <= q + shift + right
//
// q and k are local to what the caller holds; `shift` is the diagonal in those coordinates
// (q_offset + diagonal - k_offset). Causal is the limit right = 0.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flashbpt {

struct KeyRange {
  int64_t begin;
  int64_t end;  // exclusive

  FLASHBPT_HOST_DEVICE bool empty() const { return begin >= end; }
};

struct Band {
  static constexpr int64_t kNoLimit = int64_t{1} << 60;

  int64_t left = kNoLimit;
  int64_t right = kNoLimit;

  // window_left and window_right: further keys on each side of the diagonal, -1 for no limit.
  static constexpr Band from_flags(bool causal, int64_t window_left, int64_t window_right) {
    Band band;
    if (window_left >= 0 && window_left < kNoLimit) band.left = window_left;
    if (window_right >= 0 && window_right < kNoLimit) band.right = window_right;
    if (causal) band.right = 0;
    return band;
  }

  FLASHBPT_HOST_DEVICE bool limits() const { return left != kNoLimit || right != kNoLimit; }

  // Keys that row q sees, cut to [0, len_k).
  FLASHBPT_HOST_DEVICE KeyRange of_row(int64_t q, int64_t shift, int64_t len_k) const {
    return {clamp(q + shift - left, len_k), clamp(q + shift + right + 1, len_k)};
  }

  // Keys that at least one of the rows [q_begin, q_end) sees. The rows must not be empty.
  FLASHBPT_HOST_DEVICE KeyRange of_rows(int64_t q_begin, int64_t q_end, int64_t shift,
                                        int64_t len_k) const {
    return {of_row(q_begin, shift, len_k).begin, of_row(q_end - 1, shift, len_k).end};
  }

 private:
  FLASHBPT_HOST_DEVICE static int64_t clamp(int64_t k, int64_t len_k) {
    return k < 0 ? 0 : (k > len_k ? len_k : k);
  }
};

}  // namespace flashbpt
