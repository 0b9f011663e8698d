#pragma once

#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

template <size_t kRow>
void launch_paged_prefill_kernel(unsigned blocks, const PagedPrefillKernelParams& p,
                                 cudaStream_t stream) {
  constexpr PagedPrefillKernel kKernel = kPagedPrefillKernels[kRow];
  allow_shared_memory<paged_prefill_kernel<kRow>>(kKernel.smem_bytes());
  launch_kernel<paged_prefill_kernel<kRow>>(blocks, kKernel.config.threads(), kKernel.smem_bytes(),
                                            stream, p);
}

template <typename T>
void launch_paged_prefill_typed(size_t row, unsigned blocks, const PagedPrefillKernelParams& p,
                                cudaStream_t stream) {
  dispatch_row<kPagedPrefillKernels, T>(
      row, false, [&](auto row, auto) { launch_paged_prefill_kernel<row()>(blocks, p, stream); });
}

}  // namespace flashbpt::sm80
