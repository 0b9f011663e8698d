// Arithmetic on one row of a tile, compiled once per instruction set and chosen at load time.
// x, y: [n], unit stride. NaN propagates through everything but `row_max`, whose callers
// exponentiate the row afterwards and find the NaN there, and `drop_row`, which drops it.
#pragma once

#include <cstdint>

namespace flashbpt::cpu {

// max(x), -inf for n = 0.
float row_max(const float* x, int64_t n);
double row_max(const double* x, int64_t n);

// x = exp((x - hi) - lo); returns the sum. hi must not be -inf, and (x - hi) - lo at most 88.
float exp_row(float* x, int64_t n, float hi, float lo);
double exp_row(double* x, int64_t n, double hi, double lo);

// x *= a
void scale_row(float* x, int64_t n, float a);
void scale_row(double* x, int64_t n, double a);

// x += y
void add_row(float* x, const float* y, int64_t n);
void add_row(double* x, const double* y, int64_t n);

float dot_row(const float* x, const float* y, int64_t n);
double dot_row(const double* x, const double* y, int64_t n);

// x[j] -= slope * |distance - j|
void add_alibi_row(float* x, int64_t n, float slope, int64_t distance);
void add_alibi_row(double* x, int64_t n, double slope, int64_t distance);

// sum of x[j] * |distance - j|
float dot_alibi_row(const float* x, int64_t n, int64_t distance);
double dot_alibi_row(const double* x, int64_t n, int64_t distance);

// x = keep ? a * x : 0
void drop_row(float* x, const uint8_t* keep, int64_t n, float a);
void drop_row(double* x, const uint8_t* keep, int64_t n, double a);

// dp = p * (dp - delta): the gradient of the softmax
void softmax_grad_row(float* dp, const float* p, int64_t n, float delta);
void softmax_grad_row(double* dp, const double* p, int64_t n, double delta);

// ds *= 1 - t^2: the gradient of cap * tanh(score / cap), t = tanh(score / cap)
void tanh_grad_row(float* ds, const float* t, int64_t n);
void tanh_grad_row(double* ds, const double* t, int64_t n);

}  // namespace flashbpt::cpu
