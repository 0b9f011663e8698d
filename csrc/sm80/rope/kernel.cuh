// out = turn(norm(x)), norm(x) = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps)
// turn(a, b) = (a cos - b sin, b cos + a sin) of the pairs of a head's first 2 pairs columns
// Turning back it is the backward of heads without a norm.
//
// Who does what: 2^n lanes share a few neighbouring heads of a row. A lane has 8 columns and the 8
// that turn with them of each, read at once, so that out may be x, and one piece of cos and sin for
// all. Heads that are no whole pieces of 8 take a warp each, a pair a lane, and the norm reads them
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
template <int kHeads, typename Use>
__device__ void for_each_place(const RopeParams& p, Use use) {
  const int places_at_once = blockDim.x / p.lanes;
  const int64_t count = p.rows * p.row_places.value();
  for (int64_t start = int64_t{blockIdx.x} * places_at_once; start < count;
       start += int64_t{gridDim.x} * places_at_once) {
    const int64_t index = start + threadIdx.x / p.lanes;
    const auto [row, place] = divide(index, p.row_places);
    const int first = place * kHeads;
    use(RopePlace{row, first, static_cast<int>(threadIdx.x % p.lanes),
                  index < count ? p.heads - first : 0});
  }
}

template <typename T, int kPiece, int kHeads>
__device__ void rope_heads(const RopeParams& p, const RopePlace& place) {
  using Columns = RopeColumns<kPiece>;
  using Unit = RopeUnit<T, kPiece>;
  const T* const weight = static_cast<const T*>(p.weight);
  Unit x[kHeads];
  RopeAngles<kPiece> angles;
  const auto load = [&](const Columns& columns) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      if (h < place.heads)
        x[h] = Unit::load(static_cast<const T*>(p.in.data) + place.offset(p.in, h), p, columns);
    if (place.heads > 0) angles = RopeAngles<kPiece>::load(p, place.row, columns);
  };
  if constexpr (kPiece > 1) place.for_each_unit<kPiece>(p, load);
  float rstd[kHeads];
  if (weight != nullptr) {
    float square[kHeads] = {};
    place.for_each_unit<kPiece>(p, [&](const Columns& columns) {
      if constexpr (kPiece == 1) load(columns);
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int i = 0; i < 2 * kPiece; ++i) square[h] += x[h].get(i) * x[h].get(i);
    });
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      rstd[h] = rsqrtf(tile::sum_lanes(square[h], p.lanes) * p.share + p.eps);
  }
  place.for_each_unit<kPiece>(p, [&](const Columns& columns) {
    if constexpr (kPiece == 1) load(columns);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= place.heads) continue;
      RopeElements<kPiece> y;
#pragma unroll
      for (int i = 0; i < 2 * kPiece; ++i) y[i] = x[h].get(i);
      if (weight != nullptr) {
        const Unit w = Unit::load(weight, p, columns);
#pragma unroll
        for (int i = 0; i < 2 * kPiece; ++i) y[i] *= rstd[h] * w.get(i);
      }
      angles.turn(y, p, columns, p.sign);
      store_elements<T, kPiece>(y, static_cast<T*>(p.out.data) + place.offset(p.out, h), p,
                                columns);
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kRopeConfig.block_threads, kRopeConfig.min_blocks)
    rope_kernel(const __grid_constant__ RopeParams p) {
  ptx::follow_earlier_grids();
  constexpr int kHeads = kRopeConfig.heads(sizeof(T));
  if (p.vectorised)
    for_each_place<kHeads>(
        p, [&](const RopePlace& place) { rope_heads<T, kRopeConfig.piece, kHeads>(p, place); });
  else
    for_each_place<1>(p, [&](const RopePlace& place) { rope_heads<T, 1, 1>(p, place); });
}

}  // namespace flashbpt::sm80
