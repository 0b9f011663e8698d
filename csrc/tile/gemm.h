// The warp's matrix product over operands of tile/operand.h: d [16 kM, 8 kN] += a b.
#pragma once

#include <type_traits>

#include "../ptx/mma.h"
#include "operand.h"

namespace flashbpt::tile {

// How fp32 operands are multiplied: one TF32 product (10 bits of mantissa), or three that carry the
// bits that TF32 cuts off, which comes to fp32 accuracy.
enum class Precision { kTf32, k3xTf32 };

// x rounded to TF32.
__device__ inline uint32_t round_to_tf32(uint32_t x) {
  return (x + 0x1000u) & 0xffffe000u;
}

// What TF32 takes from each x; x becomes what it keeps.
template <int kCount>
__device__ void split_tf32(uint32_t (&x)[kCount], uint32_t (&rest)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t high = round_to_tf32(x[i]);
    rest[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(high));
    x[i] = high;
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

// One step of the inner dimension.
template <typename T, Precision kPrecision, int kM, int kN, typename A, typename B>
__device__ void gemm_step(float (&d)[kM][kN][4], const A& a_operand, const B& b_operand, int step) {
  constexpr bool kSplit = std::is_same_v<T, float> && kPrecision == Precision::k3xTf32;
  uint32_t a[kM][4], a_rest[kM][4];
  a_operand.load(step, a);
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int m = 0; m < kM; ++m) split_tf32(a[m], a_rest[m]);
  }
#pragma unroll
  for (int pair = 0; pair < kN / 2; ++pair) {
    uint32_t b[4], b_rest[4];
    b_operand.load(step, pair, b);
    if constexpr (std::is_same_v<T, float>) split_tf32(b, b_rest);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&sum)[4] = d[m][2 * pair + half];
        if constexpr (kSplit) {
          mma<T>(sum, a_rest[m], b[2 * half], b[2 * half + 1]);
          mma<T>(sum, a[m], b_rest[2 * half], b_rest[2 * half + 1]);
        }
        mma<T>(sum, a[m], b[2 * half], b[2 * half + 1]);
      }
  }
}

template <typename T, Precision kPrecision, int kSteps, int kM, int kN, typename A, typename B>
__device__ void gemm(float (&d)[kM][kN][4], const A& a, const B& b) {
#pragma unroll
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
