// The kernels of one element type; a translation unit each, so that they compile side by side.
#pragma once

#include <iterator>
#include <utility>

#include "../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

template <size_t kRow, bool kTf32>
void launch_attn_fwd_kernel(const AttnFwdKernelParams& p, cudaStream_t stream) {
  constexpr AttnFwdConfig kConfig = kAttnFwdKernels[kRow].config;
  constexpr auto kKernel = attn_fwd_kernel<kRow, kTf32>;
  const int smem = kConfig.smem_bytes(p.mask ? element_bytes(p.mask.dtype) : 0);
  const int64_t blocks = int64_t{p.order.tiles} * p.order.heads * p.splits * p.slices_v;
  allow_shared_memory<kKernel>(kConfig.smem_bytes(most_mask_bytes(kAttnFwdKernels[kRow].terms)));
  kKernel<<<static_cast<unsigned>(blocks), kConfig.threads(), smem, stream>>>(p);
}

// Runs the row of kAttnFwdKernels with this index if it is of type T.
template <typename T, size_t kRow>
void launch_attn_fwd_row(size_t row, const AttnFwdKernelParams& p, cudaStream_t stream) {
  if constexpr (kAttnFwdKernels[kRow].dtype == tile::Element<T>::kDtype) {
    if (row != kRow) return;
    if constexpr (sizeof(T) == 4) {
      if (p.tf32) return launch_attn_fwd_kernel<kRow, true>(p, stream);
    }
    launch_attn_fwd_kernel<kRow, false>(p, stream);
  }
}

template <typename T, size_t... kRows>
void launch_attn_fwd_rows(size_t row, const AttnFwdKernelParams& p, cudaStream_t stream,
                          std::index_sequence<kRows...>) {
  (launch_attn_fwd_row<T, kRows>(row, p, stream), ...);
}

template <typename T>
void launch_attn_fwd_typed(size_t row, const AttnFwdKernelParams& p, cudaStream_t stream) {
  launch_attn_fwd_rows<T>(row, p, stream, std::make_index_sequence<std::size(kAttnFwdKernels)>());
}

}  // namespace flashbpt::sm80
