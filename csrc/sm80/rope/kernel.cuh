// out = turn(norm(x)), norm(x) = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps)
// turn(a, b) = (a cos - b sin, b cos + a sin) of the pairs of a head's first 2 pairs columns
//
// Who does what: 2^n lanes share a head. A lane has 8 columns and the 8 that turn with them, read
// at once, so that out may be x; heads of a row are neighbours and read one row of cos and sin.
// Heads that are no whole pieces of 8 take a warp each, a pair a lane, and the norm reads them
// twice.
//
// Barriers: none; lanes add up their squares by shuffles.
//
// docs/block_rows.md
#pragma once

#include "../../ptx/grid.h"
#include "../../tile/lanes.h"
#include "../divide.h"
#include "config.h"
#include "unit.h"

namespace flashbpt::sm80 {

// use(place) for each of a block's rounds over the heads. All threads take part in all of them:
// lanes of a warp may have heads past the last.
template <typename Use>
__device__ void for_each_head(const RopeParams& p, Use use) {
  const int heads_at_once = blockDim.x / p.lanes;
  const int64_t count = p.rows * p.heads;
  for (int64_t first = int64_t{blockIdx.x} * heads_at_once; first < count;
       first += int64_t{gridDim.x} * heads_at_once) {
    const int64_t index = first + threadIdx.x / p.lanes;
    const auto [row, head] = divide(index, p.heads_divisor);
    use(RopePlace{row, head, static_cast<int>(threadIdx.x % p.lanes), index < count});
  }
}

template <typename T, int kPiece>
__device__ void rope_head(const RopeParams& p, const RopePlace& place) {
  using Columns = RopeColumns<kPiece>;
  using Unit = RopeUnit<T, kPiece>;
  const T* const weight = static_cast<const T*>(p.weight);
  Unit x;
  RopeAngles<kPiece> angles;
  const auto load = [&](const Columns& columns) {
    x = Unit::load(static_cast<const T*>(p.in.data) + place.offset(p.in), p, columns);
    angles = RopeAngles<kPiece>::load(p, place.row, columns);
  };
  if constexpr (kPiece > 1) place.for_each_unit<kPiece>(p, load);
  float rstd = 1;
  if (weight != nullptr) {
    float square = 0;
    place.for_each_unit<kPiece>(p, [&](const Columns& columns) {
      if constexpr (kPiece == 1) load(columns);
#pragma unroll
      for (int i = 0; i < 2 * kPiece; ++i) square += x.get(i) * x.get(i);
    });
    rstd = rsqrtf(tile::sum_lanes(square, p.lanes) / p.dim + p.eps);
  }
  place.for_each_unit<kPiece>(p, [&](const Columns& columns) {
    if constexpr (kPiece == 1) load(columns);
    RopeElements<kPiece> y;
#pragma unroll
    for (int i = 0; i < 2 * kPiece; ++i) y[i] = x.get(i);
    if (weight != nullptr) {
      const Unit w = Unit::load(weight, p, columns);
#pragma unroll
      for (int i = 0; i < 2 * kPiece; ++i) y[i] *= rstd * w.get(i);
    }
    angles.turn(y, p, columns, 1.0f);
    store_elements<T, kPiece>(y, static_cast<T*>(p.out.data) + place.offset(p.out), p, columns);
  });
}

template <typename T>
__global__ void __launch_bounds__(kRopeConfig.block_threads, kRopeConfig.min_blocks)
    rope_kernel(const __grid_constant__ RopeParams p) {
  ptx::follow_earlier_grids();
  for_each_head(p, [&](const RopePlace& place) {
    if (p.vectorised)
      rope_head<T, kRopeConfig.piece>(p, place);
    else
      rope_head<T, 1>(p, place);
  });
}

}  // namespace flashbpt::sm80
