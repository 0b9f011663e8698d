// The forward of attn_fwd for keys in pages: the same schedule, but the rows of a tile of keys are
// gathered, and where the next tile's lie is looked up while the present one is multiplied.
//
// docs/paged.md
#pragma once

#include "../attn_fwd/kernel.cuh"
#include "config.h"
#include "launch_kernels.h"

namespace flashbpt::sm80 {

template <size_t kRow>
using PagedPrefill = AttnFwdOf<kPagedPrefillKernels, kRow, false, PagedPrefillKernelParams>;

template <size_t kRow>
__global__ void __launch_bounds__(PagedPrefill<kRow>::kThreads, PagedPrefill<kRow>::kMinBlocks)
    paged_prefill_kernel(const __grid_constant__ PagedPrefillKernelParams p) {
  ptx::follow_earlier_grids();
  attend<PagedPrefill<kRow>>(p);
}

}  // namespace flashbpt::sm80
