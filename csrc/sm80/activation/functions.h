// Activation functions and their slopes in fp32: finite for every finite x, and NaN for NaN.
#pragma once

#include "../../ptx/math.h"

namespace flashbpt::sm80 {

struct Activated {
  float value, slope;
};

// x s(t) with the logistic function s, and its slope where t' = slope_t. By e = exp(-|t|) <= 1,
// which neither overflows nor makes a divisor above 2 (a fast reciprocal of 1 + exp(87.5) would be
// 0, and with it x s(x), which is still a normal number there).
__device__ inline Activated times_logistic(float x, float t, float slope_t) {
  const float e = expf(-fabsf(t)), r = ptx::reciprocal(1.0f + e);
  const float s = t < 0 ? e * r : r;
  const float value = t < 0 ? x * e * r : x * r;  // e alone may be subnormal
  return {value, s + x * (e * r * r) * slope_t};
}

__device__ inline Activated silu(float x) {
  return times_logistic(x, x, 1.0f);
}

// x Phi(x), Phi(x) = (1 + erf(x / sqrt(2))) / 2
__device__ inline Activated gelu(float x) {
  constexpr float kSqrtHalf = 0.70710678f, kDensity = 0.39894228f;  // 1 / sqrt(2 pi)
  const float phi = 0.5f + 0.5f * erff(kSqrtHalf * x);
  return {x * phi, phi + x * (kDensity * expf(-0.5f * x * x))};
}

// x (1 + tanh(u)) / 2 = x s(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). Past +-20 s is 0 or 1, and
// u takes no part in it that could overflow.
__device__ inline Activated gelu_tanh(float x) {
  constexpr float kLinear = 1.5957691f, kCubic = kLinear * 0.044715f;
  const float c = fminf(fmaxf(x, -20.0f), 20.0f), square = c * c;
  return times_logistic(x, c * (kLinear + kCubic * square), kLinear + 3 * kCubic * square);
}

__device__ inline Activated relu(float x) {
  return {x <= 0 ? 0.0f : x, x <= 0 ? 0.0f : 1.0f};
}

}  // namespace flashbpt::sm80
