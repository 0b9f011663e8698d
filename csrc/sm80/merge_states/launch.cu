#include "launch.h"

#include <algorithm>

#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {
namespace {

template <typename T>
void launch(const MergeStatesParams& p, cudaStream_t stream) {
  constexpr MergeStatesConfig kConfig = MergeNumbers<T>::kConfig;
  constexpr int64_t kMaxGrid = INT32_MAX;
  // A row's pieces (vectors, or single elements) are spread evenly over as few passes of the block
  // as hold them, and rows fill the rest of the block; a warp may straddle rows.
  const int64_t width = p.vectorised ? kConfig.vector_elements() : 1;
  const int64_t thread_width =
      p.vectorised ? kConfig.thread_vectors * width : kConfig.vector_elements();
  const int64_t threads = std::max<int64_t>(1, (p.shape.dim + thread_width - 1) / thread_width);
  const int64_t passes = (threads + kConfig.block_threads - 1) / kConfig.block_threads;
  const int64_t threads_x = (threads + passes - 1) / passes;
  const int64_t threads_y = std::min(kConfig.block_threads / threads_x, p.shape.rows);
  const int64_t blocks = std::min((p.shape.rows + threads_y - 1) / threads_y, kMaxGrid);
  const dim3 threads_xy(static_cast<unsigned>(threads_x), static_cast<unsigned>(threads_y));
  launch_kernel<merge_states_kernel<T>>(blocks, threads_xy, kConfig.smem_bytes(), stream, p);
}

}  // namespace

void launch_merge_states(const MergeStatesParams& params, cudaStream_t stream) {
  switch (params.shape.dtype) {
    case DataType::kBFloat16:
      return launch<__nv_bfloat16>(params, stream);
    case DataType::kFloat16:
      return launch<__half>(params, stream);
    case DataType::kFloat32:
      return launch<float>(params, stream);
    case DataType::kFloat64:
      return launch<double>(params, stream);
    case DataType::kBool:
      break;
  }
}

}  // namespace flashbpt::sm80
