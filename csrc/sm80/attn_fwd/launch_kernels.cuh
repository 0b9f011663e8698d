// The kernels of one element type; a translation unit each, so that they compile side by side.
#pragma once

#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

template <size_t kRow, bool kTf32>
void launch_attn_fwd_kernel(const AttnFwdKernelParams& p, cudaStream_t stream) {
  constexpr AttnFwdConfig kConfig = kAttnFwdKernels[kRow].config;
  constexpr auto kKernel = attn_fwd_kernel<kRow, kTf32>;
  const int smem = kConfig.smem_bytes(mask_element_bytes(p));
  const int64_t blocks = p.order.count() * p.splits.count * p.slices_v.value();
  allow_shared_memory<kKernel>(kConfig.smem_bytes(most_mask_bytes(kAttnFwdKernels[kRow].terms)));
  launch_kernel<kKernel>(blocks, kConfig.threads(), smem, stream, p);
}

template <typename T>
void launch_attn_fwd_typed(size_t row, const AttnFwdKernelParams& p, cudaStream_t stream) {
  dispatch_row<kAttnFwdKernels, T>(
      row, p.tf32, [&](auto row, auto tf32) { launch_attn_fwd_kernel<row(), tf32()>(p, stream); });
}

}  // namespace flashbpt::sm80
