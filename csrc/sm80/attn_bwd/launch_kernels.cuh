// The kernels of one element type; a translation unit each, so that they compile side by side.
#pragma once

#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

template <size_t kRow, bool kTf32>
void launch_attn_bwd_kernel(const AttnBwdKernelParams& p, cudaStream_t stream) {
  constexpr AttnBwdConfig kConfig = kAttnBwdKernels[kRow].config;
  constexpr auto kKernel = attn_bwd_kernel<kRow, kTf32>;
  const int smem = kConfig.smem_bytes(mask_element_bytes(p));
  const int64_t blocks = p.order.count() * p.q_splits * p.slices.value();
  allow_shared_memory<kKernel>(kConfig.smem_bytes(most_mask_bytes(kAttnBwdKernels[kRow].terms)));
  launch_kernel<kKernel>(blocks, kConfig.threads(), smem, stream, p);
}

template <typename T>
void launch_attn_bwd_typed(size_t row, const AttnBwdKernelParams& p, cudaStream_t stream) {
  dispatch_row<kAttnBwdKernels, T>(
      row, p.tf32, [&](auto row, auto tf32) { launch_attn_bwd_kernel<row(), tf32()>(p, stream); });
}

}  // namespace flashbpt::sm80
