#include "launch.h"

#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

void launch_rng_state(const int64_t* seed_gmem, uint64_t seed, const int64_t* offset_gmem,
                      uint64_t offset, int64_t* state, cudaStream_t stream) {
  launch_kernel<rng_state_kernel>(1, 1, 0, stream, seed_gmem, seed, offset_gmem, offset, state);
}

}  // namespace flashbpt::sm80
