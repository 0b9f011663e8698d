// state = {seed, offset}
//
// Who does what: one thread reads both where graph capture keeps them, or takes the values.
//
// Barriers: none.
#pragma once

#include "../../ptx/grid.h"
#include "launch.h"

namespace flashbpt::sm80 {

__global__ void __launch_bounds__(1)
    rng_state_kernel(const int64_t* seed_gmem, uint64_t seed, const int64_t* offset_gmem,
                     uint64_t offset, int64_t* state) {
  ptx::follow_earlier_grids();
  state[0] = static_cast<int64_t>(seed_gmem ? static_cast<uint64_t>(*seed_gmem) : seed);
  // The offset of a captured draw counts from where the replay begins.
  state[1] = static_cast<int64_t>(offset + (offset_gmem ? static_cast<uint64_t>(*offset_gmem) : 0));
}

}  // namespace flashbpt::sm80
