// Activation functions and their slopes in fp32: finite for every finite x, and NaN for NaN.
#pragma once

#include "../../ptx/math.h"

namespace flashbpt::sm80 {

struct Activated {
  float value, slope;
};

// exp(-x) for x >= 0, down to subnormal numbers. A result of 16 bits rounds away the digits that
// the fast one lacks, some x * 2^-23 of it.
template <typename T>
__device__ float decay(float x) {
  if constexpr (sizeof(T) == 4) return expf(-x);
  constexpr float kHalfLog2e = 0.72134752f;
  const float root = ptx::exp2(-kHalfLog2e * x);  // not subnormal where its square is
  return root * root;
}

// x s(t) with the logistic function s, and its slope where t' = slope_t. By e = exp(-|t|) <= 1,
// which neither overflows nor makes a divisor above 2 (a fast reciprocal of 1 + exp(87.5) would be
// 0, and with it x s(x), which is still a normal number there).
template <typename T>
__device__ Activated times_logistic(float x, float t, float slope_t) {
  const float e = decay<T>(fabsf(t)), r = ptx::reciprocal(1.0f + e);
  const float s = t < 0 ? e * r : r;
  const float value = t < 0 ? x * e * r : x * r;  // e alone may be subnormal
  return {value, s + x * (e * r * r) * slope_t};
}

template <typename T>
__device__ Activated silu(float x) {
  return times_logistic<T>(x, x, 1.0f);
}

// x Phi(x). With q = |x|, Phi(-q) = erfc(q / sqrt(2)) / 2 = t exp2(P(t) - q^2 log2(e) / 2) with
// t = 1 / (1 + 0.4 q) and P of degree 8, fitted by Chebyshev's nodes to q in [0, 13.5]: relative
// error 1e-7 (before rounding), so that the tail of negative x keeps its digits.
__device__ inline Activated gelu(float x) {
  constexpr float kP[] = {-2.64750381f, 1.43825751f, 0.538729857f, -0.269496483f, 0.801029424f,
                          -2.55489964f, 2.83642868f, -1.42003755f, 0.277492154f};
  constexpr float kHalfLog2e = 0.72134752f, kDensity = 0.39894228f;  // 1 / sqrt(2 pi)
  const float q = fabsf(x), t = ptx::reciprocal(fmaf(0.4f, q, 1.0f));
  float power = kP[8];
#pragma unroll
  for (int i = 7; i >= 0; --i) power = fmaf(power, t, kP[i]);
  const float falling = -kHalfLog2e * q;
  const float tail = t * ptx::exp2(fmaf(falling, q, power));
  const float phi = x < 0 ? tail : 1.0f - tail;
  return {x * phi, fmaf(x, kDensity * ptx::exp2(falling * q), phi)};
}

// x (1 + tanh(u)) / 2 = x s(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). Past +-20 s is 0 or 1, and
// u takes no part in it that could overflow.
template <typename T>
__device__ Activated gelu_tanh(float x) {
  constexpr float kLinear = 1.5957691f, kCubic = kLinear * 0.044715f;
  const float c = fminf(fmaxf(x, -20.0f), 20.0f), square = c * c;
  return times_logistic<T>(x, c * (kLinear + kCubic * square), kLinear + 3 * kCubic * square);
}

__device__ inline Activated relu(float x) {
  return {x <= 0 ? 0.0f : x, x <= 0 ? 0.0f : 1.0f};
}

}  // namespace flashbpt::sm80
