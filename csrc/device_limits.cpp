#include "device_limits.h"

#include <atomic>

#ifdef FLASHBPT_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>

#include <algorithm>
#endif

namespace flashbpt {
namespace {

std::atomic<int64_t> shared_memory_limit{0};

}  // namespace

void limit_shared_memory(int64_t bytes) {
  shared_memory_limit = bytes;
}

#ifdef FLASHBPT_WITH_CUDA
DeviceLimits device_limits(const at::Tensor& t) {
  const cudaDeviceProp& gpu = *at::cuda::getDeviceProperties(t.get_device());
  int64_t smem = static_cast<int64_t>(gpu.sharedMemPerBlockOptin);
  if (const int64_t limit = shared_memory_limit) smem = std::min(smem, limit);
  return {gpu.multiProcessorCount, static_cast<int>(smem), gpu.l2CacheSize};
}
#endif

}  // namespace flashbpt
