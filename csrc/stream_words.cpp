#ifdef FLASHBPT_WITH_CUDA
#include "stream_words.h"

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
    const Key key{capture, stream.device_index(), stream};
    if (int32_t* const words = find(key)) return words;
    const std::lock_guard<std::mutex> lock(growing_);
    if (int32_t* const words = find(key)) return words;
    int32_t* const words = take(key);
    if (capture) keep_with(graph, key);
    return words;
  }

 private:
  using Key = std::tuple<CaptureId, c10::DeviceIndex, cudaStream_t>;
  using Use = std::pair<Pool*, Key>;

  int32_t* find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = taken_.find(key);
    return at == taken_.end() ? nullptr : at->second;
  }
  int32_t* take(const Key& key) {
    const auto device = std::get<c10::DeviceIndex>(key);
    std::unique_lock<std::mutex> lock(mutex_);
    std::vector<int32_t*>& free = free_[device];
    if (free.empty()) {
      lock.unlock();
      int32_t* const words = new_words(device);
      lock.lock();
      for (int64_t i = 0; i < kCount; ++i) free.push_back(words + i * kWords);
    }
    int32_t* const words = free.back();
    taken_.emplace(key, words);
    free.pop_back();
    return words;
  }
  void give_back(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = taken_.find(key);
    free_[std::get<c10::DeviceIndex>(key)].push_back(at->second);
    taken_.erase(at);
  }

  // From the caching allocator, on a stream of their own: past the pool of a graph that is being
  // captured, which they outlive. The wait, for nothing but the zeros, is once in kCount uses.
  int32_t* new_words(c10::DeviceIndex device) {
    const c10::cuda::CUDAGuard guard(device);
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    cudaStream_t& raw = streams_[device];
    if (!raw) C10_CUDA_CHECK(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking));
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromExternal(raw, device);
    const c10::cuda::CUDAStreamGuard on(stream);
    slabs_.push_back(
        at::zeros({kCount, kWords}, at::TensorOptions(at::kInt).device(at::kCUDA, device)));
    stream.synchronize();
    return slabs_.back().data_ptr<int32_t>();
  }

  // Gives the words back when the graph, and all that was instantiated from it, is gone. The driver
  // says so on a thread of its own, which must not wait for one that waits for the driver.
  void keep_with(cudaGraph_t graph, const Key& key) {
    const auto release = [](void* data) {
      const std::unique_ptr<Use> use(static_cast<Use*>(data));
      use->first->give_back(use->second);
    };
    auto use = std::make_unique<Use>(this, key);
    cudaUserObject_t object;
    const cudaError_t created =
        cudaUserObjectCreate(&object, use.get(), release, 1, cudaUserObjectNoDestructorSync);
    if (created != cudaSuccess) give_back(key);
    C10_CUDA_CHECK(created);
    use.release();  // the object's
    const cudaError_t kept = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    if (kept != cudaSuccess) cudaUserObjectRelease(object, 1);
    C10_CUDA_CHECK(kept);
  }

  static constexpr int64_t kWords = StreamWords::kBarriers + StreamWords::kCounters;
  static constexpr int64_t kCount = 64;  // sets of words in a slab

  std::mutex growing_;  // of what the driver's thread does not touch
  std::map<c10::DeviceIndex, cudaStream_t> streams_;
  std::vector<at::Tensor> slabs_;

  std::mutex mutex_;  // of what it does
  std::map<Key, int32_t*> taken_;
  std::map<c10::DeviceIndex, std::vector<int32_t*>> free_;
};

}  // namespace

StreamWords stream_words(c10::cuda::CUDAStream stream) {
  static Pool* const pool = new Pool;
  int32_t* const words = pool->of(stream);
  return {words, words + StreamWords::kBarriers};
}

}  // namespace flashbpt

#endif
