#pragma once

#include "../../launch_kernel.h"
#include "kernel.cuh"
#include "launch_kernels.h"

namespace flashbpt::sm80 {

template <size_t kRow>
void launch_paged_decode_kernel(const PagedDecodeParams& p, cudaStream_t stream) {
  constexpr PagedDecodeConfig kConfig = kPagedDecodeKernels[kRow].config;
  constexpr auto kKernel = paged_decode_kernel<kRow>;
  allow_shared_memory<kKernel>(kConfig.smem_bytes());
  launch_kernel<kKernel>(p.schedule.blocks(), kConfig.threads(), kConfig.smem_bytes(), stream, p);
}

// The rows with this cache and type.
template <CacheType kCache, DataType kDtype>
void launch_paged_decode_of(const PagedDecodeParams& p, cudaStream_t stream) {
  const auto try_row = [&](auto k) {
    if constexpr (kPagedDecodeKernels[k()].cache == kCache &&
                  kPagedDecodeKernels[k()].dtype == kDtype) {
      if (p.row == k()) launch_paged_decode_kernel<k()>(p, stream);
    }
  };
  [&]<size_t... kRows>(std::index_sequence<kRows...>) {
    (try_row(std::integral_constant<size_t, kRows>()), ...);
  }(std::make_index_sequence<std::size(kPagedDecodeKernels)>());
}

}  // namespace flashbpt::sm80
