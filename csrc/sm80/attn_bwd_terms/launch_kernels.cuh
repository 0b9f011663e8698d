// The kernels of one element type; a translation unit each, so that they compile side by side.
#pragma once

#include <iterator>
#include <utility>

#include "../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

template <size_t kRow, bool kTf32>
void launch_attn_bwd_terms_kernel(const AttnBwdTermsKernelParams& p, cudaStream_t stream) {
  constexpr AttnBwdConfig kConfig = kAttnBwdTermsKernels[kRow].config;
  constexpr auto kKernel = attn_bwd_terms_kernel<kRow, kTf32>;
  const int smem = kConfig.smem_bytes(p.mask ? element_bytes(p.mask.dtype) : 0);
  allow_shared_memory<kKernel>(kConfig.smem_bytes(4));
  kKernel<<<static_cast<unsigned>(p.blocks()), kConfig.threads(), smem, stream>>>(p);
}

// Runs the row of kAttnBwdTermsKernels with this index if it is of type T.
template <typename T, size_t kRow>
void launch_attn_bwd_terms_row(size_t row, const AttnBwdTermsKernelParams& p, cudaStream_t stream) {
  if constexpr (kAttnBwdTermsKernels[kRow].dtype == tile::Element<T>::kDtype) {
    if (row != kRow) return;
    if constexpr (sizeof(T) == 4) {
      if (p.tf32) return launch_attn_bwd_terms_kernel<kRow, true>(p, stream);
    }
    launch_attn_bwd_terms_kernel<kRow, false>(p, stream);
  }
}

template <typename T, size_t... kRows>
void launch_attn_bwd_terms_rows(size_t row, const AttnBwdTermsKernelParams& p, cudaStream_t stream,
                                std::index_sequence<kRows...>) {
  (launch_attn_bwd_terms_row<T, kRows>(row, p, stream), ...);
}

template <typename T>
void launch_attn_bwd_terms_typed(size_t row, const AttnBwdTermsKernelParams& p,
                                 cudaStream_t stream) {
  launch_attn_bwd_terms_rows<T>(row, p, stream,
                                std::make_index_sequence<std::size(kAttnBwdTermsKernels)>());
}

}  // namespace flashbpt::sm80
