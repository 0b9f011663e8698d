// From products to scores: scale, softcap, ALiBi, and what a row does not see.
#pragma once

#include "../../attention/score_terms.h"
#include "launch.h"
#include "segments.h"

namespace flashbpt::sm80 {

// Of the rows of a segment that a lane holds, 16 m + g + 8 half, with columns 2 t and 2 t + 1 of
// each eight keys. kTerms: where there may be more than a positive scale; without, scores stay
// products, and the softmax takes the scale.
template <int kM, bool kExact, bool kTerms>
class PagedScores {
 public:
  __device__ PagedScores(const PagedDecodeParams& p, const Segment& s, int kv_head)
      : p_(p), s_(s), kv_head_(kv_head), shift_(s.request.length - s.request.rows) {
    const int first = row_of(p.schedule, s.row_tile, kv_head, 0).token,
              last = row_of(p.schedule, s.row_tile, kv_head, 16 * kM - 1).token;
    const KeyRange all =
        seen_by_all(p.band, shift_, s.end, first, min(last, s.request.rows - 1) + 1);
    all_begin_ = static_cast<int>(all.begin), all_end_ = static_cast<int>(all.end);
    if (kTerms && p.tree != nullptr) tree_at_ = tree_begin();
  }

  // What the products are multiplied by.
  static __device__ float scale(const PagedDecodeParams& p, int kv_head) {
    const float k_scale = p.k.scale ? p.k.scale[kv_head * p.k.scale_stride] : 1.0f;
    return static_cast<float>(p.scale) * k_scale;
  }
  static __device__ bool any_terms(const PagedDecodeParams& p, int kv_head) {
    return kExact || p.softcap > 0 || p.alibi || p.tree != nullptr || !(scale(p, kv_head) > 0.0f);
  }

  // x [16 kM, 8 kN], the products with the keys from `key` on, become scores; -inf where a row does
  // not see a key.
  template <int kN>
  __device__ void finish(float (&x)[kM][kN][4], int key) const {
    if constexpr (kTerms) {
      const float scale = PagedScores::scale(p_, kv_head_);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) x[m][n][i] *= scale;
      if (p_.softcap > 0 || p_.alibi) add_terms(x, key);
    }
    if (key < all_begin_ || key + 8 * kN > all_end_) hide(x, key);
    if constexpr (kTerms) {
      if (p_.tree != nullptr && key + 8 * kN > shift_) hide_by_tree(x, key);
    }
  }

 private:
  static __device__ int row(int m, int half) { return threadIdx.x % 32 / 4 + 16 * m + 8 * half; }
  static __device__ int column(int key, int n, int i) {
    return key + 8 * n + threadIdx.x % 4 * 2 + i;
  }

  template <int kN>
  __device__ void hide(float (&x)[kM][kN][4], int key) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PagedRow at = row_of(p_.schedule, s_.row_tile, kv_head_, row(m, half));
        const KeyRange seen = p_.band.of_row(at.token, shift_, s_.end);
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int k = column(key, n, i);
            if (k < seen.begin || k >= seen.end) x[m][n][2 * half + i] = -INFINITY;
          }
      }
  }

  template <int kN>
  __device__ void add_terms(float (&x)[kM][kN][4], int key) const {
    const float cap = static_cast<float>(p_.softcap);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PagedRow at = row_of(p_.schedule, s_.row_tile, kv_head_, row(m, half));
        const float slope =
            p_.alibi && at.token < s_.request.rows
                ? static_cast<const float*>(p_.alibi.data)[s_.batch * p_.alibi.batch + at.head]
                : 0.0f;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& y = x[m][n][2 * half + i];
            const float distance = fabsf(float(at.token + shift_ - column(key, n, i)));
            if (cap > 0.0f) y = cap * (kExact ? tanhf(y / cap) : fast_tanh(y / cap));
            y -= slope * distance;
          }
      }
  }

  template <int kN>
  __device__ void hide_by_tree(float (&x)[kM][kN][4], int key) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = row_of(p_.schedule, s_.row_tile, kv_head_, row(m, half)).token;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int newest = column(key, n, i) - shift_;  // among the request's new keys
            if (token >= s_.request.rows || newest < 0 || newest >= s_.request.rows) continue;
            if (!p_.tree[tree_at_ + int64_t{token} * s_.request.rows + newest])
              x[m][n][2 * half + i] = -INFINITY;
          }
      }
  }
  // Where the request's square begins: the sum of those before. All lanes of the warp.
  __device__ int64_t tree_begin() const {
    int64_t sum = 0;
    for (int b = threadIdx.x % 32; b < s_.batch; b += 32) {
      const int64_t rows = rows_of(p_, b);
      sum += rows * rows;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    return sum;
  }

  const PagedDecodeParams& p_;
  const Segment& s_;
  const int kv_head_;
  const int shift_;          // the request's keys that are older than its rows
  int all_begin_, all_end_;  // keys of the segment that all of its rows see
  int64_t tree_at_ = 0;
};

}  // namespace flashbpt::sm80
