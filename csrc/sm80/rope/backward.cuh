// dx = rstd (g - xhat mean(g xhat)), xhat = x rstd, g = d weight, d = dy turned back
// dweight = sum over rows and heads of d xhat         without a norm: dx = d, from fp32 dy
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
    RopePlace{0, 0, lane, 1}.for_each_unit<kPiece>(p, [&](const RopeColumns<kPiece>& columns) {
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

template <typename T, typename Grad, int kPiece, int kHeads>
__device__ void rope_heads_backward(const RopeBackwardParams& p, const RopePlace& place,
                                    RopeSums<kPiece>& sums) {
  using Columns = RopeColumns<kPiece>;
  using Unit = RopeUnit<T, kPiece>;
  const T* const weight = static_cast<const T*>(p.weight);
  RopeUnit<Grad, kPiece> dy[kHeads];
  Unit x[kHeads];
  RopeAngles<kPiece> angles;
  const auto load = [&](const Columns& columns) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= place.heads) continue;
      const Grad* const dy_gmem = static_cast<const Grad*>(p.in.data) + place.offset(p.in, h);
      dy[h] = RopeUnit<Grad, kPiece>::load(dy_gmem, p, columns);
      const T* const x_gmem = static_cast<const T*>(p.x.data) + place.offset(p.x, h);
      if (weight != nullptr) x[h] = Unit::load(x_gmem, p, columns);
    }
    if (place.heads > 0) angles = RopeAngles<kPiece>::load(p, place.row, columns);
  };
  if constexpr (kPiece > 1) place.for_each_unit<kPiece>(p, load);
  // One head after the other: d of all of them at once would not fit the registers.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    RopeElements<kPiece> d;
    const auto turn_back = [&](const Columns& columns) {
      if constexpr (kPiece == 1) load(columns);
#pragma unroll
      for (int i = 0; i < 2 * kPiece; ++i) d[i] = dy[h].get(i);
      angles.turn(d, p, columns, -1.0f);
    };
    float square = 0, product = 0;  // means of x^2 and g x
    if (weight != nullptr) {
      place.for_each_unit<kPiece>(p, [&](const Columns& columns) {
        if (h >= place.heads) return;
        turn_back(columns);
        const Unit w = Unit::load(weight, p, columns);
#pragma unroll
        for (int i = 0; i < 2 * kPiece; ++i) {
          square += x[h].get(i) * x[h].get(i);
          product += d[i] * w.get(i) * x[h].get(i);
        }
      });
      square = tile::sum_lanes(square, p.lanes) * p.share;
      product = tile::sum_lanes(product, p.lanes) * p.share;
    }
    const float rstd = rsqrtf(square + p.eps);
    const float along = rstd * product;  // mean(g xhat)
    place.for_each_unit<kPiece>(p, [&](const Columns& columns) {
      if (h >= place.heads) return;
      if (kPiece == 1 || weight == nullptr) turn_back(columns);
      if (weight != nullptr) {
        const Unit w = Unit::load(weight, p, columns);
        RopeElements<kPiece> dweight;
#pragma unroll
        for (int i = 0; i < 2 * kPiece; ++i) {
          const float x_hat = x[h].get(i) * rstd;
          dweight[i] = d[i] * x_hat;
          d[i] = rstd * (d[i] * w.get(i) - x_hat * along);
        }
        sums.add(p, columns, dweight);
      }
      store_elements<T, kPiece>(d, static_cast<T*>(p.out.data) + place.offset(p.out, h), p,
                                columns);
    });
  }
}

template <typename T, typename Grad, int kPiece, int kHeads>
__device__ void rope_backward(const RopeBackwardParams& p, float* sums_smem) {
  const int lane = threadIdx.x % p.lanes, group = threadIdx.x / p.lanes;
  const bool needs_sums = p.weight_partials != nullptr;
  RopeSums<kPiece> sums{needs_sums ? sums_smem + group * p.dim : nullptr};
  if constexpr (kPiece == 1) sums.store(p, lane);
  for_each_place<kHeads>(p, [&](const RopePlace& place) {
    rope_heads_backward<T, Grad, kPiece, kHeads>(p, place, sums);
  });
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
__global__ void __launch_bounds__(rope_backward_config(sizeof(T)).block_threads,
                                  rope_backward_config(sizeof(T)).min_blocks)
    rope_backward_kernel(const __grid_constant__ RopeBackwardParams p) {
  ptx::follow_earlier_grids();
  constexpr RopeConfig kConfig = rope_backward_config(sizeof(T));
  extern __shared__ float sums_smem[];  // [groups of lanes, dim]
  const bool wide = p.in.dtype == DataType::kFloat32;
  if (p.vectorised && wide)
    rope_backward<T, float, kConfig.piece, kConfig.heads(sizeof(T))>(p, sums_smem);
  else if (p.vectorised)
    rope_backward<T, T, kConfig.piece, kConfig.heads(sizeof(T))>(p, sums_smem);
  else if (wide)
    rope_backward<T, float, 1, 1>(p, sums_smem);
  else
    rope_backward<T, T, 1, 1>(p, sums_smem);
}

}  // namespace flashbpt::sm80
