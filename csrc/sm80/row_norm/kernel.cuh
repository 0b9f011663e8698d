// out = (x - mean) rstd weight + bias, rstd = 1 / sqrt(mean((x - mean)^2) + eps); RMSNorm: mean 0
//
// Who does what: the threads along x share a row, each the same few vectors of 16 bytes of every
// row, read once into registers; a row of few vectors takes one warp, and warps along y rows of
// their own. Rows that are no whole vectors, or too wide, are read element by element in each pass.
//
// Barriers: a __syncthreads for each sum over a row of several warps (row_sums.h).
//
// docs/block_rows.md
#pragma once

#include "../../ptx/grid.h"
#include "../../tile/vector.h"
#include "config.h"
#include "launch.h"
#include "row_sums.h"

namespace flashbpt::sm80 {

// A thread's columns of a row: for_each calls use(column, vector from there).
template <typename T>
struct HeldRow {
  static constexpr int kWidth = kRowNormConfig.vector_bytes / sizeof(T);
  static constexpr int kPieces = kRowNormConfig.thread_bytes / kRowNormConfig.vector_bytes;
  using Vector = tile::Vector<T, kWidth>;

  int width;
  Vector x_reg[kPieces];

  static __device__ int column(int piece) { return (piece * blockDim.x + threadIdx.x) * kWidth; }

  __device__ HeldRow(const T* x_gmem, int width) : width(width) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (column(i) < width) x_reg[i] = *reinterpret_cast<const Vector*>(x_gmem + column(i));
  }

  template <typename Use>
  __device__ void for_each(Use use) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (column(i) < width) use(column(i), x_reg[i]);
  }
};

template <typename T>
struct StreamedRow {
  static constexpr int kWidth = 1;
  using Vector = tile::Vector<T, 1>;

  const T* x_gmem;
  int width;

  template <typename Use>
  __device__ void for_each(Use use) const {
    for (int c = threadIdx.x; c < width; c += blockDim.x) use(c, Vector{x_gmem[c]});
  }
};

template <typename T, typename Row>
__device__ void normalize(const RowNormParams& p, const Row& row, T* out, RowSums& sums) {
  using Vector = typename Row::Vector;
  const float share = 1.0f / static_cast<float>(p.width);
  float mean = 0;
  if (p.centred) {
    float sum[1] = {};
    row.for_each([&](int, const Vector& x) {
#pragma unroll
      for (int j = 0; j < Row::kWidth; ++j) sum[0] += x.get(j);
    });
    sums.add_up(sum);
    mean = sum[0] * share;
  }
  float square[1] = {};
  row.for_each([&](int, const Vector& x) {
#pragma unroll
    for (int j = 0; j < Row::kWidth; ++j) square[0] += (x.get(j) - mean) * (x.get(j) - mean);
  });
  sums.add_up(square);
  const float rstd = rsqrtf(square[0] * share + p.eps);
  const T* const weight = static_cast<const T*>(p.weight);
  const T* const bias = static_cast<const T*>(p.bias);
  row.for_each([&](int column, const Vector& x) {
    float y[Row::kWidth];
#pragma unroll
    for (int j = 0; j < Row::kWidth; ++j) y[j] = (x.get(j) - mean) * rstd;
    if (weight != nullptr) {
      const Vector w = *reinterpret_cast<const Vector*>(weight + column);
#pragma unroll
      for (int j = 0; j < Row::kWidth; ++j) y[j] *= w.get(j);
    }
    if (bias != nullptr) {
      const Vector b = *reinterpret_cast<const Vector*>(bias + column);
#pragma unroll
      for (int j = 0; j < Row::kWidth; ++j) y[j] += b.get(j);
    }
    *reinterpret_cast<Vector*>(out + column) = Vector::round(y);
  });
}

template <typename T>
__global__ void __launch_bounds__(kRowNormConfig.max_threads, kRowNormConfig.min_blocks)
    row_norm_kernel(const __grid_constant__ RowNormParams p) {
  ptx::follow_earlier_grids();
  __shared__ RowSumsSmem smem;
  RowSums sums{smem};
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  for (int64_t r = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; r < p.rows; r += step) {
    const T* const x_gmem = static_cast<const T*>(p.x) + r * p.width;
    T* const out_gmem = static_cast<T*>(p.out) + r * p.width;
    if (p.vectorised)
      normalize<T>(p, HeldRow<T>(x_gmem, p.width), out_gmem, sums);
    else
      normalize<T>(p, StreamedRow<T>{x_gmem, p.width}, out_gmem, sums);
  }
}

}  // namespace flashbpt::sm80
