// The kernels of one element type; a translation unit each, so that they compile side by side.
#pragma once

#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

template <size_t kRow, bool kTf32>
void launch_attn_bwd_terms_kernel(const AttnBwdTermsKernelParams& p, cudaStream_t stream) {
  constexpr AttnBwdConfig kConfig = kAttnBwdTermsKernels[kRow].config;
  constexpr auto kKernel = attn_bwd_terms_kernel<kRow, kTf32>;
  const int smem = kConfig.smem_bytes(mask_element_bytes(p));
  allow_shared_memory<kKernel>(kConfig.smem_bytes(4));
  launch_kernel<kKernel>(p.blocks(), kConfig.threads(), smem, stream, p);
}

template <typename T>
void launch_attn_bwd_terms_typed(size_t row, const AttnBwdTermsKernelParams& p,
                                 cudaStream_t stream) {
  dispatch_row<kAttnBwdTermsKernels, T>(row, p.tf32, [&](auto row, auto tf32) {
    launch_attn_bwd_terms_kernel<row(), tf32()>(p, stream);
  });
}

}  // namespace flashbpt::sm80
