// What happens to a fragment of scores between the product and the softmax: scale, softcap, ALiBi;
// and what causal, window and the end of the keys hide. Masks: mask_stage.h.
//
// row, col: this lane's first element, in local rows and keys of the sequence. A lane holds rows
// {0, 8} + 16 m and columns {0, 1} + 8 n from there.
#pragma once

#include <cmath>

#include "../params.h"
#include "../ptx/math.h"
#include "kv_range.h"
#include "sequence.h"
#include "softmax.h"

namespace flashbpt {

// tanh from exponentials; its error, 1e-7 absolute, is below what 16-bit inputs carry.
__device__ inline float fast_tanh(float x) {
  return 1.0f - 2.0f * ptx::reciprocal(1.0f + ptx::exp2(2.0f * kLog2e * x));
}

struct ScoreTerms {
  float scale;
  float softcap;  // 0: none
  float slope;    // 0: none
  int64_t shift;  // the diagonal of the sequence

  __device__ ScoreTerms(const AttentionParams& p, const Sequence& seq, int64_t head)
      : scale(static_cast<float>(p.scale)),
        softcap(static_cast<float>(p.softcap)),
        slope(0.0f),
        shift(seq.shift) {
    if (p.alibi) slope = static_cast<const float*>(p.alibi.data)[seq.batch * p.alibi.batch + head];
  }

  __device__ bool only_scale() const { return softcap == 0.0f && slope == 0.0f; }

  // The capped score in units of the cap: tanh(score / cap).
  template <bool kExact>
  __device__ float capped(float product) const {
    const float x = product * (scale / softcap);
    return kExact ? tanhf(x) : fast_tanh(x);
  }

  // |row + shift - col|, the distance from the diagonal.
  static __device__ float distance(float from_first, int row, int col) {
    return fabsf(from_first + static_cast<float>(row - col));
  }

  // s: products, which become scaled, capped and biased by distance.
  template <bool kExact, int kM, int kN>
  __device__ void apply(float (&s)[kM][kN][4], int row, int col) const {
    if (softcap > 0.0f) {
      for_each(s, [&](float& x, int, int) { x = softcap * capped<kExact>(x); });
    } else {
      for_each(s, [&](float& x, int, int) { x *= scale; });
    }
    add_alibi(s, row, col);
  }

  template <int kM, int kN>
  __device__ void add_alibi(float (&s)[kM][kN][4], int row, int col) const {
    add_alibi(s, slope, static_cast<float>(row + shift - col));
  }
  // from_first: from the diagonal to this lane's first element.
  template <int kM, int kN>
  static __device__ void add_alibi(float (&s)[kM][kN][4], float slope, float from_first) {
    if (slope == 0.0f) return;
    for_each(s, [&](float& x, int r, int c) { x -= slope * distance(from_first, r, c); });
  }

  // f(element, row offset, column offset)
  template <int kM, int kN, typename F>
  static __device__ void for_each(float (&s)[kM][kN][4], F f) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) f(s[m][n][i], 16 * m + 8 * (i / 2), 8 * n + i % 2);
  }
};

// Scores of a row outside of [begin, end) become -inf; counted from this lane's first column.
template <int kN>
__device__ void hide_outside(float (&s)[kN][4], int half, int begin, int end) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = 8 * n + i;
      if (c < begin || c >= end) s[n][2 * half + i] = -INFINITY;
    }
}

// Scores outside of what each row sees become -inf.
template <int kM, int kN>
__device__ void hide_unseen(float (&s)[kM][kN][4], const Band& band, int64_t shift, int64_t len_k,
                            int row, int col) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange keys = band.of_row(row + 16 * m + 8 * half, shift, len_k);
      hide_outside(s[m], half, static_cast<int>(keys.begin) - col,
                   static_cast<int>(keys.end) - col);
    }
}

// The keys that every one of the rows [q_begin, q_end) sees: tiles inside need no hiding.
__device__ inline KeyRange seen_by_all(const Band& band, int64_t shift, int64_t len_k,
                                       int64_t q_begin, int64_t q_end) {
  return {band.of_row(q_end - 1, shift, len_k).begin, band.of_row(q_begin, shift, len_k).end};
}

}  // namespace flashbpt
