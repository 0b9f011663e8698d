// dx = residual + rstd (g - mean(g) - xhat mean(g xhat)), g = dy weight, xhat = (x - mean) rstd;
// RMSNorm: without mean(g)         dweight = sum_rows dy xhat         dbias = sum_rows dy
//
// Who does what: a block takes every gridDim.x-th row and its threads the same columns of each, so
// that they sum dweight and dbias of these in registers; add_partials adds up the blocks. A thread
// copies its part of the next rows to shared memory while it computes this one. Rows that are no
// whole vectors, or too wide, are read element by element in each pass, and their sums lie in
// global memory.
//
// Barriers: a __syncthreads for each sum over a row of several warps (row_sums.h). None for copies:
// a thread reads what it copied itself.
//
// docs/block_rows.md
#pragma once

#include "../../ptx/cp_async.h"
#include "../../ptx/grid.h"
#include "../../tile/vector.h"
#include "config.h"
#include "launch.h"
#include "row_sums.h"

namespace flashbpt::sm80 {

// A thread's columns of a row: for_each calls use(piece, column, x, dy), vectors from `column` on.
template <typename T>
struct StagedRows {
  static constexpr RowNormBackwardConfig kConfig = kRowNormBackwardConfig;
  static constexpr int kWidth = kConfig.vector_bytes / sizeof(T);
  static constexpr int kPieces = kConfig.thread_columns / kWidth;
  using Vector = tile::Vector<T, kWidth>;
  using Sums = tile::Vector<float, 4>;
  enum Stream { kX, kDy, kResidual, kStreams };

  const RowNormBackwardParams& p;
  Vector* stages_smem;  // [stages, kStreams, kPieces, threads]
  int stage = 0;
  float weight_sums[kPieces * kWidth] = {}, bias_sums[kPieces * kWidth] = {};

  static __device__ int column(int piece) { return (piece * blockDim.x + threadIdx.x) * kWidth; }
  __device__ Vector* staged(int stage, int stream, int piece) const {
    return stages_smem + ((stage * kStreams + stream) * kPieces + piece) * blockDim.x + threadIdx.x;
  }

  __device__ void copy(int64_t row, int to_stage) const {
    const void* const streams[kStreams] = {p.x, p.dy, p.residual};
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      if (row >= p.rows || streams[s] == nullptr) continue;
      const T* const row_gmem = static_cast<const T*>(streams[s]) + row * p.width;
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        if (column(i) < p.width)
          ptx::cp_async_16(static_cast<uint32_t>(__cvta_generic_to_shared(staged(to_stage, s, i))),
                           row_gmem + column(i));
    }
    ptx::cp_async_commit();
  }

  // Starts the last of the rows under way and waits for this one.
  __device__ void arrive(int64_t row) {
    constexpr int kAhead = kConfig.stages - 1;
    if (row == blockIdx.x)
      for (int i = 0; i < kAhead; ++i) copy(row + i * gridDim.x, i);
    else
      stage = stage == kAhead ? 0 : stage + 1;
    copy(row + kAhead * int64_t{gridDim.x}, stage == 0 ? kAhead : stage - 1);
    ptx::cp_async_wait<kAhead>();
  }

  template <typename Use>
  __device__ void for_each(Use use) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (column(i) < p.width) use(i, column(i), *staged(stage, kX, i), *staged(stage, kDy, i));
  }
  __device__ Vector residual(int64_t, int piece, int) const {
    return *staged(stage, kResidual, piece);
  }
  __device__ void add(int piece, int, int j, float dweight, float dbias) {
    weight_sums[piece * kWidth + j] += dweight;
    bias_sums[piece * kWidth + j] += dbias;
  }
  __device__ void store_sums() const {
#pragma unroll
    for (int i = 0; i < kPieces * kWidth; i += 4) {
      const int c = column(i / kWidth) + i % kWidth;
      if (c >= p.width) continue;
      const int64_t at = int64_t{blockIdx.x} * p.width + c;
      if (p.weight_partials != nullptr)
        *reinterpret_cast<Sums*>(p.weight_partials + at) = Sums::round(weight_sums + i);
      if (p.bias_partials != nullptr)
        *reinterpret_cast<Sums*>(p.bias_partials + at) = Sums::round(bias_sums + i);
    }
  }
};

template <typename T>
struct StreamedRows {
  static constexpr int kWidth = 1;
  using Vector = tile::Vector<T, 1>;

  const RowNormBackwardParams& p;
  int64_t at = 0;  // of the row

  __device__ void arrive(int64_t row) { at = row * p.width; }

  template <typename Use>
  __device__ void for_each(Use use) const {
    const T *x_gmem = static_cast<const T*>(p.x) + at, *dy_gmem = static_cast<const T*>(p.dy) + at;
    for (int c = threadIdx.x; c < p.width; c += blockDim.x)
      use(0, c, Vector{x_gmem[c]}, Vector{dy_gmem[c]});
  }
  __device__ Vector residual(int64_t row, int, int column) const {
    return {static_cast<const T*>(p.residual)[row * p.width + column]};
  }
  // The block's first row sets what the others add to.
  __device__ void add(int, int column, int, float dweight, float dbias) const {
    const bool first = at == int64_t{blockIdx.x} * p.width;
    const int64_t to = int64_t{blockIdx.x} * p.width + column;
    if (p.weight_partials != nullptr)
      p.weight_partials[to] = (first ? 0 : p.weight_partials[to]) + dweight;
    if (p.bias_partials != nullptr) p.bias_partials[to] = (first ? 0 : p.bias_partials[to]) + dbias;
  }
  __device__ void store_sums() const {}
};

template <typename T, int kWidth>
__device__ tile::Vector<T, kWidth> weights(const RowNormBackwardParams& p, int column) {
  using Vector = tile::Vector<T, kWidth>;
  const T* const weight = static_cast<const T*>(p.weight) + column;
  if (p.weight != nullptr) return *reinterpret_cast<const Vector*>(weight);
  float ones[kWidth];
#pragma unroll
  for (float& one : ones) one = 1;
  return Vector::round(ones);
}

template <typename T, typename Rows>
__device__ void norm_backward(const RowNormBackwardParams& p, Rows& rows, RowSums& row_sums) {
  using Vector = typename Rows::Vector;
  constexpr int kWidth = Rows::kWidth;
  const float share = 1.0f / static_cast<float>(p.width);
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    rows.arrive(r);
    float mean = 0;
    if (p.centred) {
      float sum[1] = {};
      rows.for_each([&](int, int, const Vector& x, const Vector&) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[0] += x.get(j);
      });
      row_sums.add_up(sum);
      mean = sum[0] * share;
    }
    float sums[3] = {};  // of (x - mean)^2, g (x - mean), g
    rows.for_each([&](int, int column, const Vector& x, const Vector& dy) {
      const Vector w = weights<T, kWidth>(p, column);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float centred = x.get(j) - mean, g = dy.get(j) * w.get(j);
        sums[0] += centred * centred;
        sums[1] += centred * g;
        sums[2] += g;
      }
    });
    row_sums.add_up(sums);
    const float rstd = rsqrtf(sums[0] * share + p.eps);
    const float along_x = rstd * sums[1] * share;  // mean(g xhat)
    const float along_one = p.centred ? sums[2] * share : 0.0f;
    T* const dx_gmem = static_cast<T*>(p.out) + r * p.width;
    rows.for_each([&](int piece, int column, const Vector& x, const Vector& dy) {
      const Vector w = weights<T, kWidth>(p, column);
      float dx[kWidth] = {};
      if (p.residual != nullptr) {
        const Vector residual = rows.residual(r, piece, column);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dx[j] = residual.get(j);
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float x_hat = (x.get(j) - mean) * rstd;
        dx[j] += rstd * (dy.get(j) * w.get(j) - along_one - x_hat * along_x);
        rows.add(piece, column, j, dy.get(j) * x_hat, dy.get(j));
      }
      *reinterpret_cast<Vector*>(dx_gmem + column) = Vector::round(dx);
    });
  }
  rows.store_sums();
}

template <typename T>
__global__ void __launch_bounds__(kRowNormBackwardConfig.sm_threads)
    row_norm_backward_kernel(const __grid_constant__ RowNormBackwardParams p) {
  ptx::follow_earlier_grids();
  extern __shared__ uint4 stages_smem[];
  __shared__ RowSumsSmem smem;
  RowSums row_sums{smem};
  if (p.vectorised) {
    StagedRows<T> rows{p, reinterpret_cast<typename StagedRows<T>::Vector*>(stages_smem)};
    norm_backward<T>(p, rows, row_sums);
  } else {
    StreamedRows<T> rows{p};
    norm_backward<T>(p, rows, row_sums);
  }
}

}  // namespace flashbpt::sm80
