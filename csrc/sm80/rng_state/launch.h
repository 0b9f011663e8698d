#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashbpt::sm80 {

// state = {seed, offset}, read when the kernel runs: under graph capture both are in device memory,
// each replay finds new ones, and `offset` is added. Pointers may be null, then the values count.
void launch_rng_state(const int64_t* seed_gmem, uint64_t seed, const int64_t* offset_gmem,
                      uint64_t offset, int64_t* state, cudaStream_t stream);

}  // namespace flashbpt::sm80
