// The online softmax on fragments of scores: 16 kM rows x 8 kN columns a warp, of which a lane
// holds rows {g, g + 8} + 16 m and columns {2 t, 2 t + 1} + 8 n.
//
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). What is
// subtracted is a reference, not the running maximum, and every sum has the same one in the end. It
// follows the maximum only when that has grown by more than kSlack, so that most tiles leave the
// accumulators alone: P may then reach 2^kSlack (update), or the limit of weigh_ahead.
#pragma once

#include <cmath>
#include <type_traits>

#include "../ptx/math.h"
#include "../tile/element.h"

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
    weigh(s);
  }

  // s, of a row's first tile, becomes P.
  template <int kN>
  __device__ void start(float (&s)[kM][kN][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) reference[m][half] = row_top(s[m], half);
    weigh(s);
  }

  // P of a tile by the references as they stand, packed as operand a of the next product; s stays.
  // The maximum only keeps exponentials in range, and as all terms are positive, a lane's sum of
  // them bounds each. False, with no sum changed, where one is over the limit or NaN, or where a
  // row has no keys yet: `update` has to do that tile. To the scores of a row its `shift` is still
  // to be added.
  template <typename T, int kN>
  __device__ bool weigh_ahead(const float (&s)[kM][kN][4], const float (&shift)[2],
                              uint32_t (&p)[kN / 2][4]) {
    static_assert(kM == 1);
    // P in fp16 ends at 65504; P V has to stay in range too.
    constexpr float kLimit = std::is_same_v<T, __half> ? 0x1p15f : 0x1p30f;
    float row_sums[2][2] = {};
    const auto weigh = [&](auto f) {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float x = ptx::exp2(f(s[0][n][2 * half], half));
          const float y = ptx::exp2(f(s[0][n][2 * half + 1], half));
          p[n / 2][n % 2 * 2 + half] = tile::Element<T>::pack(x, y);
          row_sums[half][0] += x;
          row_sums[half][1] += y;
        }
    };
    // A reference of -inf gives +inf or NaN.
    if (kMayBoth && subtract_first)
      weigh([&](float x, int half) { return (x - (reference[0][half] - shift[half])) * unit; });
    else
      weigh([&](float x, int half) {
        return fmaf(x, unit, -(reference[0][half] - shift[half]) * unit);
      });
    const float low = row_sums[0][0] + row_sums[0][1], high = row_sums[1][0] + row_sums[1][1];
    if (!__all_sync(0xffffffffu, low <= kLimit && high <= kLimit)) return false;
    sum[0][0] += low;
    sum[0][1] += high;
    return true;
  }

  // The sum over all columns, once at the end.
  __device__ void finish() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] = quad_sum(sum[m][half]);
  }

  // What a row comes to when its sum is whole: O times factor, LSE = top + log(sum). The sink joins
  // the sum as one more key without a value. kept: the factor of what dropout keeps.
  struct End {
    float top, sum, factor;

    __device__ float log_sum() const { return kLn2 * ptx::log2(sum); }
  };
  __device__ End end(int m, int half, const float* sink, float kept) const {
    End end{reference[m][half] * (unit * kLn2), sum[m][half], 1.0f};
    if (sink != nullptr) {
      const float both = fmaxf(end.top, *sink);
      if (both != -INFINITY) {
        end.factor = expf(end.top - both);
        end.sum = end.sum * end.factor + expf(*sink - both);
      }
      end.top = both;
    }
    end.factor = end.sum == 0.0f ? 0.0f : end.factor * kept * ptx::reciprocal(end.sum);
    return end;
  }

 private:
  // s becomes P.
  template <int kN>
  __device__ void weigh(float (&s)[kM][kN][4]) {
    if (kMayBoth && subtract_first)
      weigh(s, [&](float x, float base) { return (x - base) * unit; });
    else
      weigh(s, [&](float x, float base) { return fmaf(x, unit, -base * unit); });
  }

  // s becomes exp2(f(s, base of its row)).
  template <int kN, typename F>
  __device__ void weigh(float (&s)[kM][kN][4], F f) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float subtract = base(m, half);
        float row_sums[2] = {};
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = s[m][n][2 * half + i];
            x = ptx::exp2(f(x, subtract));
            row_sums[i] += x;
          }
        sum[m][half] += row_sums[0] + row_sums[1];
      }
  }

  template <int kN>
  static __device__ float row_top(const float (&s)[kN][4], int half) {
    float tops[2] = {-INFINITY, -INFINITY};  // two chains, since each waits for its last result
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) tops[i] = fmaxf(tops[i], s[n][2 * half + i]);
    return quad_max(fmaxf(tops[0], tops[1]));
  }

  // fmaxf passes over NaN: it stays out of the reference, and comes in through P.
  template <int kN, int kO, typename Share>
  __device__ void raise(const float (&s)[kM][kN][4], float (&o)[kM][kO][4], Share share) {
    float top[kM][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) top[m][half] = row_top(s[m], half);
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
