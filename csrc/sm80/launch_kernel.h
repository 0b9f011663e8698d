// Launches with more dynamic shared memory than the 48 KB that need no word.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

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

}  // namespace flashbpt::sm80
