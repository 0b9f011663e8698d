#ifdef FLASHBPT_WITH_CUDA
#include "stream_barriers.h"

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

namespace flashbpt {
namespace {

using CaptureId = unsigned long long;  // 0: none

// Never destroyed: the driver may release a graph after everything else.
class Pool {
 public:
  int32_t* of(c10::cuda::CUDAStream stream) {
    cudaStreamCaptureStatus status;
    CaptureId capture = 0;
    cudaGraph_t graph = nullptr;
    C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph));
    if (status != cudaStreamCaptureStatusActive) capture = 0;
    const std::lock_guard<std::mutex> lock(mutex_);
    const Key key{capture, stream.device_index(), stream};
    int32_t*& words = taken_[key];
    if (words) return words;
    std::vector<int32_t*>& free = free_[stream.device_index()];
    if (free.empty()) add_words(stream.device_index(), free);
    if (capture) keep_with(graph, key);
    words = free.back();
    free.pop_back();
    return words;
  }

 private:
  using Key = std::tuple<CaptureId, c10::DeviceIndex, cudaStream_t>;
  using Use = std::pair<Pool*, Key>;

  // From the caching allocator, past the pool of a graph that is being captured: they outlive it.
  void add_words(c10::DeviceIndex device, std::vector<int32_t*>& free) {
    constexpr int64_t kCount = 64;
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(false, device);
    const c10::cuda::CUDAStreamGuard guard(stream);
    slabs_.push_back(at::zeros({kCount, kStreamBarriers},
                               at::TensorOptions(at::kInt).device(at::kCUDA, device)));
    stream.synchronize();
    for (int64_t i = 0; i < kCount; ++i)
      free.push_back(slabs_.back().data_ptr<int32_t>() + i * kStreamBarriers);
  }

  // Gives the words back when the graph, and all that was instantiated from it, is gone.
  void keep_with(cudaGraph_t graph, const Key& key) {
    const auto release = [](void* data) {
      const std::unique_ptr<Use> use(static_cast<Use*>(data));
      const auto& [pool, key] = *use;
      const std::lock_guard<std::mutex> lock(pool->mutex_);
      pool->free_[std::get<c10::DeviceIndex>(key)].push_back(pool->taken_.at(key));
      pool->taken_.erase(key);
    };
    cudaUserObject_t object;
    C10_CUDA_CHECK(cudaUserObjectCreate(&object, new Use(this, key), release, 1,
                                        cudaUserObjectNoDestructorSync));
    C10_CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  }

  std::mutex mutex_;
  std::map<Key, int32_t*> taken_;
  std::map<c10::DeviceIndex, std::vector<int32_t*>> free_;
  std::vector<at::Tensor> slabs_;
};

}  // namespace

int32_t* stream_barriers(c10::cuda::CUDAStream stream) {
  static Pool* const pool = new Pool;
  return pool->of(stream);
}

}  // namespace flashbpt

#endif
