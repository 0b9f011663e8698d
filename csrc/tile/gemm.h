// The warp's matrix product over operands of tile/operand.h: d [16 kM, 8 kN] += a b.
#pragma once

#include <type_traits>

#include "../ptx/math.h"
#include "../ptx/mma.h"
#include "operand.h"

namespace flashbpt::tile {

// How fp32 operands are multiplied: one TF32 product (10 bits of mantissa), or three that carry the
// bits that TF32 cuts off, which comes to fp32 accuracy.
enum class Precision { kTf32, k3xTf32 };

// x = kept + rest, both as TF32: x rounded, and what that took from it. Emulated: cutting x off
// instead fails the bound on fp32's error now and then.
template <int kCount>
__device__ void split_tf32(uint32_t (&x)[kCount], uint32_t (&rest)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float whole = __uint_as_float(x[i]);
    x[i] = ptx::round_to_tf32(whole);
    // The tensor cores cut the rest off; half of a unit makes that rounding.
    rest[i] = __float_as_uint(whole - __uint_as_float(x[i])) + 0x1000u;
  }
}

// The tensor cores cut x off to TF32; half of a unit makes that rounding. Infinities and NaN stay.
template <int kCount>
__device__ void round_tf32(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (isfinite(__uint_as_float(x[i]))) x[i] += 0x1000u;
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

// d += a b to fp32 accuracy. The tensor cores cut sums off where fp32 rounds them, always towards
// zero, which would add up over the steps: each step's product starts from zero, and fp32 units add
// it. Where an operand is infinite the products with rests mean nothing, and that of the kept parts
// is the whole.
__device__ inline void mma_3xtf32(float (&d)[4], const uint32_t (&a)[4],
                                  const uint32_t (&a_rest)[4], const uint32_t (&b)[2],
                                  const uint32_t (&b_rest)[2]) {
  float kept[4] = {}, rests[4] = {};
  ptx::mma_m16n8k8_tf32(rests, a_rest, b[0], b[1]);
  ptx::mma_m16n8k8_tf32(rests, a, b_rest[0], b_rest[1]);
  ptx::mma_m16n8k8_tf32(kept, a, b[0], b[1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float product = kept[i] + rests[i];
    d[i] += isfinite(product) ? product : kept[i];
  }
}

// One step of the inner dimension.
template <typename T, Precision kPrecision, int kM, int kN, typename A, typename B>
__device__ void gemm_step(float (&d)[kM][kN][4], const A& a_operand, const B& b_operand, int step) {
  constexpr bool kSplit = std::is_same_v<T, float> && kPrecision == Precision::k3xTf32;
  constexpr bool kRound = std::is_same_v<T, float> && kPrecision == Precision::kTf32;
  uint32_t a[kM][4], a_rest[kM][4];
  a_operand.load(step, a);
  if constexpr (kSplit) {
#pragma unroll
    for (int m = 0; m < kM; ++m) split_tf32(a[m], a_rest[m]);
  } else if constexpr (kRound) {
#pragma unroll
    for (int m = 0; m < kM; ++m) round_tf32(a[m]);
  }
#pragma unroll
  for (int pair = 0; pair < kN / 2; ++pair) {
    uint32_t b[2][2], b_rest[2][2];
    b_operand.load(step, pair, b);
    if constexpr (kSplit) {
      split_tf32(b[0], b_rest[0]);
      split_tf32(b[1], b_rest[1]);
    } else if constexpr (kRound) {
      round_tf32(b[0]);
      round_tf32(b[1]);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&sum)[4] = d[m][2 * pair + half];
        if constexpr (kSplit)
          mma_3xtf32(sum, a[m], a_rest[m], b[half], b_rest[half]);
        else
          mma<T>(sum, a[m], b[half][0], b[half][1]);
      }
  }
}

// Three products a step keep a warp busy without the next step's; unrolled, fp32 would take the
// registers of all steps at once.
template <typename T, Precision kPrecision, int kSteps, int kM, int kN, typename A, typename B>
__device__ void gemm(float (&d)[kM][kN][4], const A& a, const B& b) {
  constexpr int kFp32Unroll = kPrecision == Precision::k3xTf32 ? 1 : 4;
#pragma unroll(sizeof(T) == 4 && A::kAnyStep ? kFp32Unroll : kSteps)
  for (int step = 0; step < kSteps; ++step) gemm_step<T, kPrecision>(d, a, b, step);
}

template <int kM, int kN>
__device__ void clear(float (&d)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) d[m][n][i] = 0.0f;
}

}  // namespace flashbpt::tile
