// From a row of a kernel's table to its launch: with more dynamic shared memory than the 48 KB that
// need no word, and under way before the stream's earlier kernels have ended.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>

#include "tile/element.h"

namespace flashbpt {

// ask() once a device: a kernel's own static bits of the devices that have answered true, and of
// those that have answered at all.
class OncePerDevice {
 public:
  template <typename F>
  bool operator()(F ask) {
    int device = 0;
    cudaGetDevice(&device);
    if (device >= 64) return ask(device);  // every time
    const uint64_t bit = uint64_t{1} << device;
    if (!(asked_.load() & bit)) {
      if (ask(device)) yes_.fetch_or(bit);
      asked_.fetch_or(bit);
    }
    return yes_.load() & bit;
  }

 private:
  std::atomic<uint64_t> asked_{0}, yes_{0};
};

// Allows kKernel `bytes` of shared memory on the current device, or all it has if that is less.
// Once a device: host threads launch one kernel with different sizes, and none may lower what
// another one is about to use.
template <auto kKernel>
void allow_shared_memory(int bytes) {
  static OncePerDevice once;
  once([&](int device) {
    int most = 0;
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const auto size = cudaFuncAttributeMaxDynamicSharedMemorySize;
    return cudaFuncSetAttribute(kKernel, size, std::min(bytes, most)) == cudaSuccess;
  });
}

// Whether what the current device runs of kKernel waits for earlier grids: code for sm_90 and newer
// does, code made from the PTX of sm_80 does not, whatever the device.
template <auto kKernel>
bool waits_for_earlier_grids() {
  static OncePerDevice once;
  return once([](int) {
    cudaFuncAttributes attributes{};
    return cudaFuncGetAttributes(&attributes, kKernel) == cudaSuccess &&
           attributes.ptxVersion >= 90;
  });
}

// Launches a kernel that begins with ptx::follow_earlier_grids(), so that its launch overlaps the
// end of the kernel before it ("Programmatic dependent launch", CUDA C++ Programming Guide).
template <auto kKernel, typename... Args>
void launch_kernel(dim3 blocks, dim3 threads, int smem_bytes, cudaStream_t stream,
                   const Args&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = waits_for_earlier_grids<kKernel>() ? 1 : 0;
  cudaLaunchKernelEx(&config, kKernel, args...);
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

}  // namespace flashbpt
