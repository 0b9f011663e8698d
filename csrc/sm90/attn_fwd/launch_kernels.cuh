// The kernels of one element type with pages, with masks, with everything, or with none of them: a
// translation unit each, so that they compile side by side.
#pragma once

#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm90 {

template <typename T, Extras kUnit>
void launch_attn_fwd_typed(size_t row, const AttnFwdKernelParams& p, int blocks,
                           cudaStream_t stream) {
  dispatch_row<kAttnFwdKernels, T>(row, false, [&](auto row, auto) {
    if constexpr (unit_of(kAttnFwdKernels[row()].extras) == kUnit) {
      constexpr AttnFwdConfig kConfig = kAttnFwdKernels[row()].config;
      constexpr auto kKernel = attn_fwd_kernel<row()>;
      allow_shared_memory<kKernel>(kConfig.smem_bytes());
      launch_kernel<kKernel>(blocks, kConfig.threads(), kConfig.smem_bytes(), stream, p);
    }
  });
}

}  // namespace flashbpt::sm90
