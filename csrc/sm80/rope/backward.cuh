// dx = rstd (g - xhat mean(g xhat)), xhat = x rstd, g = d weight, d = dy turned back
// dweight = sum over rows and heads of d xhat         without a norm: dx = d
//
// Who does what: as in the forward. A block that sums dweight takes many heads and its lanes the
// same columns of each, which they sum in registers (of heads that are no whole pieces in shared
// memory); add_partials adds up the blocks.
//
// Barriers: one __syncthreads, after which the sums of all lanes may be read.
//
// docs/block_rows.md
#pragma once

#include "kernel.cuh"

namespace flashbpt::sm80 {

// dweight of the columns of one lane, over the heads that it had.
template <int kPiece>
struct RopeSums {
  float* group_smem;  // [dim], of the lanes that share a head; null: not needed
  float held[2 * kPiece] = {};

  template <typename Use>
  static __device__ void for_each_column(const RopeParams& p, const RopeColumns<kPiece>& columns,
                                         Use use) {
#pragma unroll
    for (int i = 0; i < 2 * kPiece; ++i) {
      const int column = columns.at[i / kPiece] + i % kPiece;
      if (kPiece > 1 || column < p.dim) use(i, column);
    }
  }

  // Starts at 0, or ends with what is held.
  __device__ void store(const RopeParams& p, int lane) const {
    if (group_smem == nullptr) return;
    RopePlace{0, 0, lane, true}.for_each_unit<kPiece>(p, [&](const RopeColumns<kPiece>& columns) {
      for_each_column(p, columns, [&](int i, int column) { group_smem[column] = held[i]; });
    });
  }

  __device__ void add(const RopeParams& p, const RopeColumns<kPiece>& columns,
                      const RopeElements<kPiece>& x) {
    if constexpr (kPiece > 1) {
#pragma unroll
      for (int i = 0; i < 2 * kPiece; ++i) held[i] += x[i];
    } else if (group_smem != nullptr) {
      for_each_column(p, columns, [&](int i, int column) { group_smem[column] += x[i]; });
    }
  }
};

template <typename T, int kPiece>
__device__ void rope_head_backward(const RopeBackwardParams& p, const RopePlace& place,
                                   RopeSums<kPiece>& sums) {
  using Columns = RopeColumns<kPiece>;
  using Unit = RopeUnit<T, kPiece>;
  const T* const weight = static_cast<const T*>(p.weight);
  RopeElements<kPiece> d;
  Unit x;
  const auto load_grad = [&]<typename Grad>(const Grad* dy, const Columns& columns) {
    const auto unit = RopeUnit<Grad, kPiece>::load(dy + place.offset(p.in), p, columns);
#pragma unroll
    for (int i = 0; i < 2 * kPiece; ++i) d[i] = unit.get(i);
  };
  const auto load = [&](const Columns& columns) {
    if (weight != nullptr)
      x = Unit::load(static_cast<const T*>(p.x.data) + place.offset(p.x), p, columns);
    const auto angles = RopeAngles<kPiece>::load(p, place.row, columns);
    if (sizeof(T) == 4 || p.in.dtype == DataType::kFloat32)
      load_grad(static_cast<const float*>(p.in.data), columns);
    else
      load_grad(static_cast<const T*>(p.in.data), columns);
    angles.turn(d, p, columns, -1.0f);
  };
  const auto store = [&](const Columns& columns) {
    store_elements<T, kPiece>(d, static_cast<T*>(p.out.data) + place.offset(p.out), p, columns);
  };
  if constexpr (kPiece > 1) place.for_each_unit<kPiece>(p, load);
  float square = 0, product = 0;  // sums of x^2 and g x
  if (weight != nullptr) {
    place.for_each_unit<kPiece>(p, [&](const Columns& columns) {
      if constexpr (kPiece == 1) load(columns);
      const Unit w = Unit::load(weight, p, columns);
#pragma unroll
      for (int i = 0; i < 2 * kPiece; ++i) {
        square += x.get(i) * x.get(i);
        product += d[i] * w.get(i) * x.get(i);
      }
    });
    square = tile::sum_lanes(square, p.lanes);
    product = tile::sum_lanes(product, p.lanes);
  }
  const float rstd = rsqrtf(square / p.dim + p.eps);
  const float along = rstd * product / p.dim;  // mean(g xhat)
  place.for_each_unit<kPiece>(p, [&](const Columns& columns) {
    if constexpr (kPiece == 1) load(columns);
    if (weight != nullptr) {
      const Unit w = Unit::load(weight, p, columns);
      RopeElements<kPiece> dweight;
#pragma unroll
      for (int i = 0; i < 2 * kPiece; ++i) {
        const float x_hat = x.get(i) * rstd;
        dweight[i] = d[i] * x_hat;
        d[i] = rstd * (d[i] * w.get(i) - x_hat * along);
      }
      sums.add(p, columns, dweight);
    }
    store(columns);
  });
}

template <typename T, int kPiece>
__device__ void rope_backward(const RopeBackwardParams& p, float* sums_smem) {
  const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes;
  const bool needs_sums = p.weight_partials != nullptr;
  RopeSums<kPiece> sums{needs_sums ? sums_smem + group * p.dim : nullptr};
  if constexpr (kPiece == 1) sums.store(p, lane);
  for_each_head(p, [&](const RopePlace& place) { rope_head_backward<T, kPiece>(p, place, sums); });
  if (!needs_sums) return;
  if constexpr (kPiece > 1) sums.store(p, lane);
  __syncthreads();
  for (int c = threadIdx.x; c < p.dim; c += blockDim.x) {
    float sum = 0;
    for (int g = 0; g < static_cast<int>(blockDim.x) / p.lanes; ++g)
      sum += sums_smem[g * p.dim + c];
    p.weight_partials[int64_t{blockIdx.x} * p.dim + c] = sum;
  }
}

template <typename T>
__global__ void __launch_bounds__(kRopeBackwardConfig.block_threads,
                                  rope_backward_config(sizeof(T)).min_blocks)
    rope_backward_kernel(const __grid_constant__ RopeBackwardParams p) {
  ptx::follow_earlier_grids();
  extern __shared__ float sums_smem[];  // [groups of lanes, dim]
  if (p.vectorised)
    rope_backward<T, kRopeBackwardConfig.piece>(p, sums_smem);
  else
    rope_backward<T, 1>(p, sums_smem);
}

}  // namespace flashbpt::sm80
