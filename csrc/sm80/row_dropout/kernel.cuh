// out = residual + keep (x + bias) scale, and of the backward dx = keep dy scale: the same kernel
// without residual and bias.
//
// Who does what: a thread takes 8 neighbouring elements of a row, for which it draws two times four
// words while its loads are under way.
//
// Barriers: none. A thread reads what it writes over before.
//
// docs/block_rows.md
#pragma once

#include "../../attention/philox.h"
#include "../../ptx/grid.h"
#include "../../tile/run.h"
#include "../divide.h"
#include "config.h"
#include "launch.h"

namespace flashbpt::sm80 {

// The words of the kWidth elements from `column` on of the token's row; a word stays if it is not
// below the threshold.
template <int kWidth>
struct DropoutWords {
  uint32_t words[kWidth], threshold;

  __device__ bool keeps(int i) const { return words[i] >= threshold; }

  __device__ DropoutWords(const RowDropoutParams& p, int64_t row, int column)
      : threshold(static_cast<uint32_t>(p.threshold)) {
    if (p.rng_state == nullptr || p.threshold >> 32 != 0) {  // all stay, or none
      const bool stay = p.rng_state == nullptr;
      threshold = 1;
#pragma unroll
      for (uint32_t& word : words) word = stay;
      return;
    }
    const PhiloxKeys keys(p.rng_state[0]);
    const uint32_t counter = static_cast<uint32_t>(p.rng_state[1]) + 4 * p.site;
    const uint32_t token = p.token + static_cast<uint32_t>(row);
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const uint32_t quad = static_cast<uint32_t>(column + i) / 4;
      const PhiloxWords four = philox4x32_7(keys, {{counter, 0, token, quad}});
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i + j] = four.word[j];
    }
  }
};

// The elements of `row` from `column` on, `there` of them; kWhole: all of a run, in vectors.
template <typename T, bool kWhole>
__device__ void add_dropped(const RowDropoutParams& p, int64_t row, int column, int there) {
  constexpr int kWidth = kRowDropoutConfig.width;
  using Run = tile::Run<T, kWidth>;
  const int64_t at = row * p.width + column;
  const auto load = [&](const void* data, int64_t from) {
    return data == nullptr ? Run{} : Run::load(static_cast<const T*>(data) + from, there, kWhole);
  };
  if (kWhole) there = kWidth;
  const Run x_reg = load(p.x, at), residual = load(p.residual, at), bias = load(p.bias, column);
  const DropoutWords<kWidth> words(p, row, column);  // while the loads are under way
  const float scale = p.rng_state == nullptr ? 1.0f : p.scale;
  float x[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = x_reg.get(i);
  if (p.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] += bias.get(i);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = words.keeps(i) ? x[i] * scale : 0.0f;
  if (p.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] += residual.get(i);
  }
  Run::round(x).store(static_cast<T*>(p.out) + at, there, kWhole);
}

template <typename T>
__global__ void __launch_bounds__(kRowDropoutConfig.block_threads, kRowDropoutConfig.min_blocks)
    row_dropout_kernel(const __grid_constant__ RowDropoutParams p) {
  ptx::follow_earlier_grids();
  const auto [row, piece] =
      divide(int64_t{blockIdx.x} * kRowDropoutConfig.block_threads + threadIdx.x, p.pieces);
  if (row >= p.rows) return;
  const int column = piece * kRowDropoutConfig.width, there = p.width - column;
  if (p.vectorised && there >= kRowDropoutConfig.width)
    add_dropped<T, true>(p, row, column, there);
  else
    add_dropped<T, false>(p, row, column, there);
}

}  // namespace flashbpt::sm80
