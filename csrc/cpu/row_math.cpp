#include "row_math.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

// One copy of each function for AVX-512, one for AVX2 with FMA, one for any machine; the dynamic
// loader picks. Elsewhere the compiler's own baseline (NEON on Arm) has to do.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FLASHBPT_PER_INSTRUCTION_SET \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FLASHBPT_PER_INSTRUCTION_SET __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FLASHBPT_PER_INSTRUCTION_SET
#endif
#define FLASHBPT_INLINE static inline __attribute__((always_inline))

namespace flashbpt::cpu {
namespace {

// exp for x <= 88, to about one unit in the last place and without a branch:
// 2^n * e^r with n = round(x / ln 2); 0 below the smallest normal number.
FLASHBPT_INLINE float exp_value(float x) {
  constexpr float kLowest = -87.33654f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float c = x < kLowest ? kLowest : x;
  const float shifted = c * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;  // Cephes expf
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits;  // n stands in the low bits of `shifted`
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4B400000 + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < kLowest ? 0.0f : p * scale;
}

FLASHBPT_INLINE double exp_value(double x) {
  return std::exp(x);
}

template <typename T>
FLASHBPT_INLINE T max_of(const T* x, int64_t n) {
  T m = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : m)
  for (int64_t j = 0; j < n; ++j) m = x[j] > m ? x[j] : m;
  return m;
}

template <typename T>
FLASHBPT_INLINE T exp_of(T* x, int64_t n, T hi, T lo) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) {
    const T e = exp_value((x[j] - hi) - lo);
    x[j] = e;
    sum += e;
  }
  return sum;
}

template <typename T>
FLASHBPT_INLINE T dot_of(const T* x, const T* y, int64_t n) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) sum += x[j] * y[j];
  return sum;
}

template <typename T>
FLASHBPT_INLINE T dot_alibi_of(const T* x, int64_t n, int64_t distance) {
  const T d0 = static_cast<T>(distance);
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) sum += x[j] * std::abs(d0 - static_cast<T>(static_cast<int>(j)));
  return sum;
}

template <typename T>
FLASHBPT_INLINE void add_alibi_to(T* x, int64_t n, T slope, int64_t distance) {
  const T d0 = static_cast<T>(distance);
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    x[j] -= slope * std::abs(d0 - static_cast<T>(static_cast<int>(j)));
  }
}

template <typename T>
FLASHBPT_INLINE void drop_in(T* x, const uint8_t* keep, int64_t n, T a) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] = keep[j] ? a * x[j] : T(0);
}

template <typename T>
FLASHBPT_INLINE void softmax_grad_in(T* dp, const T* p, int64_t n, T delta) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) dp[j] = p[j] * (dp[j] - delta);
}

template <typename T>
FLASHBPT_INLINE void tanh_grad_in(T* ds, const T* t, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) ds[j] *= T(1) - t[j] * t[j];
}

template <typename T>
FLASHBPT_INLINE void scale_in(T* x, int64_t n, T a) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] *= a;
}

template <typename T>
FLASHBPT_INLINE void add_to(T* x, const T* y, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] += y[j];
}

}  // namespace

#define FLASHBPT_ROW FLASHBPT_PER_INSTRUCTION_SET

FLASHBPT_ROW float row_max(const float* x, int64_t n) {
  return max_of(x, n);
}
FLASHBPT_ROW double row_max(const double* x, int64_t n) {
  return max_of(x, n);
}

FLASHBPT_ROW float exp_row(float* x, int64_t n, float hi, float lo) {
  return exp_of(x, n, hi, lo);
}
FLASHBPT_ROW double exp_row(double* x, int64_t n, double hi, double lo) {
  return exp_of(x, n, hi, lo);
}

FLASHBPT_ROW void scale_row(float* x, int64_t n, float a) {
  scale_in(x, n, a);
}
FLASHBPT_ROW void scale_row(double* x, int64_t n, double a) {
  scale_in(x, n, a);
}

FLASHBPT_ROW void add_row(float* x, const float* y, int64_t n) {
  add_to(x, y, n);
}
FLASHBPT_ROW void add_row(double* x, const double* y, int64_t n) {
  add_to(x, y, n);
}

FLASHBPT_ROW float dot_row(const float* x, const float* y, int64_t n) {
  return dot_of(x, y, n);
}
FLASHBPT_ROW double dot_row(const double* x, const double* y, int64_t n) {
  return dot_of(x, y, n);
}

FLASHBPT_ROW void add_alibi_row(float* x, int64_t n, float slope, int64_t distance) {
  add_alibi_to(x, n, slope, distance);
}
FLASHBPT_ROW void add_alibi_row(double* x, int64_t n, double slope, int64_t distance) {
  add_alibi_to(x, n, slope, distance);
}

FLASHBPT_ROW float dot_alibi_row(const float* x, int64_t n, int64_t distance) {
  return dot_alibi_of(x, n, distance);
}
FLASHBPT_ROW double dot_alibi_row(const double* x, int64_t n, int64_t distance) {
  return dot_alibi_of(x, n, distance);
}

FLASHBPT_ROW void drop_row(float* x, const uint8_t* keep, int64_t n, float a) {
  drop_in(x, keep, n, a);
}
FLASHBPT_ROW void drop_row(double* x, const uint8_t* keep, int64_t n, double a) {
  drop_in(x, keep, n, a);
}

FLASHBPT_ROW void softmax_grad_row(float* dp, const float* p, int64_t n, float delta) {
  softmax_grad_in(dp, p, n, delta);
}
FLASHBPT_ROW void softmax_grad_row(double* dp, const double* p, int64_t n, double delta) {
  softmax_grad_in(dp, p, n, delta);
}

FLASHBPT_ROW void tanh_grad_row(float* ds, const float* t, int64_t n) {
  tanh_grad_in(ds, t, n);
}
FLASHBPT_ROW void tanh_grad_row(double* ds, const double* t, int64_t n) {
  tanh_grad_in(ds, t, n);
}

}  // namespace flashbpt::cpu
