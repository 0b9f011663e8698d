// From a row of a kernel's table to its launch, with more dynamic shared memory than the 48 KB that
// need no word.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>

#include "../tile/element.h"

namespace flashbpt::sm80 {

// Allows kKernel `bytes` of shared memory on the current device, or all it has if that is less.
// Once a device: host threads launch one kernel with different sizes, and none may lower what
// another one is about to use.
template <auto kKernel>
void allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> allowed{0};  // a bit a device; devices past 63 ask every time
  int device = 0, most = 0;
  cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load() & bit) return;
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const auto size = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (cudaFuncSetAttribute(kKernel, size, std::min(bytes, most)) == cudaSuccess)
    allowed.fetch_or(bit);
}

// f(row, tf32) with both as types of constants, for the row of the table kKernels with this index
// if it is of type T. Only fp32 has kernels of their own for TF32.
template <const auto& kKernels, typename T, typename F>
void dispatch_row(size_t row, bool tf32, F f) {
  const auto try_row = [&](auto k) {
    if constexpr (kKernels[k()].dtype == tile::Element<T>::kDtype) {
      if (row != k()) return;
      if constexpr (sizeof(T) == 4) {
        if (tf32) return f(k, std::true_type());
      }
      f(k, std::false_type());
    }
  };
  [&]<size_t... kRows>(std::index_sequence<kRows...>) {
    (try_row(std::integral_constant<size_t, kRows>()), ...);
  }(std::make_index_sequence<std::size(kKernels)>());
}

}  // namespace flashbpt::sm80
