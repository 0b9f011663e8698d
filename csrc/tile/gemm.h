// The warp's matrix product over operands of tile/operand.h: d [16 kM, 8 kN] += a b.
#pragma once

#include <type_traits>

#include "../ptx/mma.h"
#include "operand.h"

namespace flashbpt::tile {

template <int kM, int kN>
__device__ void clear(float (&d)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) d[m][n][i] = 0.0f;
}

// How fp32 operands are multiplied: one TF32 product (10 bits of mantissa), or three that carry the
// bits that TF32 cuts off, which comes to fp32 accuracy.
enum class Precision { kTf32, k3xTf32 };

// The least number that rounding to TF32 would make infinite.
constexpr float kRoundsToInfinity = 0x1.ffep127f;

// The tensor cores cut fp32 off to TF32; half of a unit makes that rounding. Infinities and NaN
// stay, and what would become infinite is cut off.
__device__ inline uint32_t add_half_unit(uint32_t x) {
  return fabsf(__uint_as_float(x)) < kRoundsToInfinity ? x + 0x1000u : x;
}

template <int kCount>
__device__ void round_tf32(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = add_half_unit(x[i]);
}

// x = kept + rest, both as TF32: x rounded, and what that took from it. Cutting x off instead fails
// the bound on fp32's error now and then.
template <int kCount>
__device__ void split_tf32(uint32_t (&x)[kCount], uint32_t (&rest)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float whole = __uint_as_float(x[i]);
    x[i] = add_half_unit(x[i]) & 0xffffe000u;
    rest[i] = __float_as_uint(whole - __uint_as_float(x[i])) + 0x1000u;
  }
}

template <typename T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  else if constexpr (std::is_same_v<T, __half>)
    ptx::mma_m16n8k16_fp16(d, a, b0, b1);
  else
    ptx::mma_m16n8k8_tf32(d, a, b0, b1);
}

// One step of the inner dimension; of fp32 in one TF32 product.
template <typename T, int kM, int kN, typename A, typename B>
__device__ void gemm_step(float (&d)[kM][kN][4], const A& a_operand, const B& b_operand, int step) {
  constexpr bool kRound = std::is_same_v<T, float>;
  uint32_t a[kM][4];
  a_operand.load(step, a);
  if constexpr (kRound) {
#pragma unroll
    for (int m = 0; m < kM; ++m) round_tf32(a[m]);
  }
#pragma unroll
  for (int pair = 0; pair < kN / 2; ++pair) {
    uint32_t b[2][2];
    b_operand.load(step, pair, b);
    if constexpr (kRound) {
      round_tf32(b[0]);
      round_tf32(b[1]);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        mma<T>(d[m][2 * pair + half], a[m], b[half][0], b[half][1]);
  }
}

// One step to fp32 accuracy: kept * kept is added to d, the products with rests to `rests`. The
// tensor cores cut sums off where fp32 rounds them, always towards zero, which would add up over
// the steps: each step's product starts from zero, and fp32 units add it. The rests are so small
// that it does not matter there.
template <int kM, int kN, typename A, typename B>
__device__ void gemm_step_3xtf32(float (&d)[kM][kN][4], float (&rests)[kM][kN][4],
                                 const A& a_operand, const B& b_operand, int step) {
  uint32_t a[kM][4], a_rest[kM][4];
  a_operand.load(step, a);
#pragma unroll
  for (int m = 0; m < kM; ++m) split_tf32(a[m], a_rest[m]);
#pragma unroll
  for (int pair = 0; pair < kN / 2; ++pair) {
    uint32_t b[2][2], b_rest[2][2];
    b_operand.load(step, pair, b);
    split_tf32(b[0], b_rest[0]);
    split_tf32(b[1], b_rest[1]);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&sum)[4] = d[m][2 * pair + half];
        float (&rest)[4] = rests[m][2 * pair + half];
        float kept[4] = {};
        ptx::mma_m16n8k8_tf32(kept, a[m], b[half][0], b[half][1]);
        ptx::mma_m16n8k8_tf32(rest, a_rest[m], b[half][0], b[half][1]);
        ptx::mma_m16n8k8_tf32(rest, a[m], b_rest[half][0], b_rest[half][1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += kept[i];
      }
  }
}

struct Nothing {
  __device__ void operator()(int) const {}
};

// d += a b over kSteps steps; each_step(step) is other work, to be done between the products. Of
// fp32 two steps keep a warp busy; unrolled, it would take the registers of all steps at once.
template <typename T, Precision kPrecision, int kSteps, int kM, int kN, typename A, typename B,
          typename EachStep = Nothing>
__device__ void gemm(float (&d)[kM][kN][4], const A& a, const B& b, EachStep each_step = {}) {
  if constexpr (std::is_same_v<T, float> && kPrecision == Precision::k3xTf32) {
    float rests[kM][kN][4];
    clear(rests);
#pragma unroll(A::kAnyStep ? 2 : kSteps)
    for (int step = 0; step < kSteps; ++step) {
      gemm_step_3xtf32(d, rests, a, b, step);
      each_step(step);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Where an operand is infinite the rests mean nothing, and what was kept is the whole.
          const float rest = rests[m][n][i];
          d[m][n][i] += isfinite(rest) ? rest : 0.0f;
        }
  } else {
#pragma unroll(sizeof(T) == 4 && A::kAnyStep ? 4 : kSteps)
    for (int step = 0; step < kSteps; ++step) {
      gemm_step<T>(d, a, b, step);
      each_step(step);
    }
  }
}

}  // namespace flashbpt::tile
