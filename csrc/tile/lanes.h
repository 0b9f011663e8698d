// Sums over lanes of a warp.
#pragma once

namespace flashbpt::tile {

// The sum over groups of `lanes` neighbours, a power of two, in each of them. All lanes of the warp
// take part.
__device__ inline float sum_lanes(float x, int lanes) {
  for (int other = lanes / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

template <int kLanes>
__device__ float sum_lanes(float x) {
#pragma unroll
  for (int other = kLanes / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

}  // namespace flashbpt::tile
