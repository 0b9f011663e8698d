// The online softmax on fragments of scores: 16 kM rows x 8 kN columns a warp, of which a lane
// holds rows {g, g + 8} + 16 m and columns {2 t, 2 t + 1} + 8 n.
//
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). What is
// subtracted is a reference, not the running maximum: it follows the maximum only when that has
// grown by more than kSlack, so that most tiles leave the accumulators alone. P may then reach
// 2^kSlack, which fp16 holds, and every sum has the same reference in the end.
#pragma once

#include <cmath>

#include "../ptx/math.h"

namespace flashbpt {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// subtract_first: exp2((s - reference) * unit), which keeps what is near finfo.min apart; else the
// product is folded into one multiply-add. kMayBoth: either, else never.
template <int kM, bool kMayBoth>
struct OnlineSoftmax {
  static constexpr float kSlack = 8.0f;  // in units of log2

  float unit;  // scores times unit are logarithms to base 2; > 0
  bool subtract_first;
  float reference[kM][2];  // -inf while a row has no keys
  float sum[kM][2];        // of this lane's columns

  __device__ OnlineSoftmax(float unit, bool subtract_first)
      : unit(unit), subtract_first(subtract_first) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -INFINITY;
        sum[m][half] = 0.0f;
      }
  }

  // Rows without keys so far subtract 0: their scores are -inf.
  __device__ float base(int m, int half) const {
    return reference[m][half] == -INFINITY ? 0.0f : reference[m][half];
  }

  // s becomes P; o and the sums move to a new reference where one is needed. share(top) turns the
  // largest scores of this warp's columns [kM][2] into those of all columns of the rows.
  template <int kN, int kO, typename Share>
  __device__ void update(float (&s)[kM][kN][4], float (&o)[kM][kO][4], Share share) {
    raise(s, o, share);
    if (kMayBoth && subtract_first)
      weigh(s, [&](float x, float base) { return (x - base) * unit; });
    else
      weigh(s, [&](float x, float base) { return fmaf(x, unit, -base * unit); });
  }

  // The sum over all columns, once at the end.
  __device__ void finish() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] = quad_sum(sum[m][half]);
  }

 private:
  // s becomes exp2(f(s, base of its row)).
  template <int kN, typename F>
  __device__ void weigh(float (&s)[kM][kN][4], F f) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float subtract = base(m, half);
        float row_sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            float& x = s[m][n][i];
            x = ptx::exp2(f(x, subtract));
            row_sum += x;
          }
        sum[m][half] += row_sum;
      }
  }

  // fmaxf passes over NaN: it stays out of the reference, and comes in through P.
  template <int kN, int kO, typename Share>
  __device__ void raise(const float (&s)[kM][kN][4], float (&o)[kM][kO][4], Share share) {
    float top[kM][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = -INFINITY;
#pragma unroll
        for (int n = 0; n < kN; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        top[m][half] = quad_max(x);
      }
    share(top);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        // False for -inf - -inf: a row that still has no keys.
        grown |= (top[m][half] - reference[m][half]) * unit > kSlack;
    if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = reference[m][half];
        reference[m][half] = fmaxf(old, top[m][half]);
        const float fade = ptx::exp2((old - base(m, half)) * unit);
        sum[m][half] *= fade;
#pragma unroll
        for (int n = 0; n < kO; ++n) {
          o[m][n][2 * half] *= fade;
          o[m][n][2 * half + 1] *= fade;
        }
      }
  }
};

}  // namespace flashbpt
