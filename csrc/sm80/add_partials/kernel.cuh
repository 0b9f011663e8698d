// totals += sum_rows partials: the last step of gradients that many blocks share a column of
//
// Who does what: a block owns 32 columns. Its warps take rows, 32 apart, a lane a column; then
// warps take columns and lanes the warps' sums. The order of additions is the same in every run.
//
// Barriers: one __syncthreads, after which the warps' sums may be read.
//
// docs/block_rows.md
#pragma once

#include "../../ptx/grid.h"
#include "../../tile/lanes.h"
#include "config.h"
#include "launch.h"

namespace flashbpt::sm80 {

__global__ void __launch_bounds__(kAddPartialsConfig.block_threads())
    add_partials_kernel(const __grid_constant__ AddPartialsParams p) {
  ptx::follow_earlier_grids();
  constexpr int kColumns = kAddPartialsConfig.columns, kGroups = kAddPartialsConfig.row_groups;
  __shared__ float sums_smem[kGroups][kColumns + 1];  // a column's words lie in different banks
  float* const totals = p.totals[blockIdx.y];
  if (totals == nullptr) return;
  const int lane = threadIdx.x, group = threadIdx.y, first = blockIdx.x * kColumns;
  float sum = 0;
  if (first + lane < p.width) {
    const float* const partials = p.partials[blockIdx.y] + first + lane;
#pragma unroll 8
    for (int64_t row = group; row < p.count; row += kGroups) sum += partials[row * p.width];
  }
  sums_smem[group][lane] = sum;
  __syncthreads();
  sum = tile::sum_lanes<32>(sums_smem[lane][group]);
  if (lane == 0 && first + group < p.width) totals[first + group] += sum;
}

}  // namespace flashbpt::sm80
