// Sums over the threads that share a row: a warp, or the whole block.
#pragma once

#include "../../tile/lanes.h"

namespace flashbpt::sm80 {

struct RowSumsSmem {
  static constexpr int kMostSums = 3, kMostWarps = 16;
  float parts[2][kMostSums][kMostWarps];
};

struct RowSums {
  RowSumsSmem& smem;
  int turn = 0;

  // Each of `sums` becomes its sum over the row's threads, in all of them.
  template <int kCount>
  __device__ void add_up(float (&sums)[kCount]) {
#pragma unroll
    for (float& sum : sums) sum = tile::sum_lanes<32>(sum);
    if (blockDim.x == 32) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto& parts = smem.parts[turn];
    if (lane < kCount) parts[lane][warp] = pick(sums, lane);
    // One barrier a sum: who is past it has read the other turn's parts, which come next.
    turn ^= 1;
    __syncthreads();
    const int warps = blockDim.x / 32, other = lane % RowSumsSmem::kMostWarps;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      sums[i] = tile::sum_lanes<RowSumsSmem::kMostWarps>(other < warps ? parts[i][other] : 0.0f);
  }

 private:
  template <int kCount>
  static __device__ float pick(const float (&sums)[kCount], int i) {
    float picked = sums[0];
#pragma unroll
    for (int j = 1; j < kCount; ++j) picked = i == j ? sums[j] : picked;
    return picked;
  }
};

}  // namespace flashbpt::sm80
