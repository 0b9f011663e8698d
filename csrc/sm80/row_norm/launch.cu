#include "launch.h"

#include <algorithm>

#include "../../dispatch_element.h"
#include "../../launch_kernel.h"
#include "../whole_vectors.h"
#include "backward.cuh"
#include "kernel.cuh"

namespace flashbpt::sm80 {
namespace {

// Whole warps of a row, each thread of which holds so many columns; if it is too wide, all.
int row_threads(int width, int thread_columns, int max_threads) {
  const int64_t warps = (int64_t{width} + 32 * thread_columns - 1) / (32 * thread_columns);
  return static_cast<int>(std::min<int64_t>(32 * warps, max_threads));
}

int backward_threads(int width) {
  constexpr RowNormBackwardConfig kConfig = kRowNormBackwardConfig;
  return row_threads(width, kConfig.thread_columns, kConfig.max_threads);
}

}  // namespace

void launch_row_norm(RowNormParams p, cudaStream_t stream) {
  constexpr RowNormConfig kConfig = kRowNormConfig;
  const int columns = kConfig.thread_bytes / element_bytes(p.dtype);
  p.vectorised =
      p.width <= columns * kConfig.max_threads &&
      whole_vectors({p.x, p.weight, p.bias, p.out}, int64_t{p.width} * element_bytes(p.dtype));
  const int threads_x = row_threads(p.width, columns, kConfig.max_threads);
  const int threads_y = threads_x == 32 ? kConfig.block_threads / 32 : 1;
  const int64_t blocks = std::min<int64_t>((p.rows + threads_y - 1) / threads_y, INT32_MAX);
  dispatch_element(p.dtype, [&](auto tag) {
    launch_kernel<row_norm_kernel<typename decltype(tag)::Type>>(blocks, dim3(threads_x, threads_y),
                                                                 0, stream, p);
  });
}

int row_norm_blocks(const RowNormParams& p, int multiprocessors) {
  const int a_multiprocessor = kRowNormBackwardConfig.sm_threads / backward_threads(p.width);
  return static_cast<int>(
      std::min<int64_t>(p.rows, int64_t{multiprocessors} * std::max(a_multiprocessor, 1)));
}

void launch_row_norm_backward(RowNormBackwardParams p, cudaStream_t stream) {
  constexpr RowNormBackwardConfig kConfig = kRowNormBackwardConfig;
  const int threads = backward_threads(p.width);
  const int64_t staged_columns = int64_t{threads} * kConfig.thread_columns;
  const int64_t smem_bytes = kConfig.smem_bytes(staged_columns * element_bytes(p.dtype));
  p.vectorised = p.width <= staged_columns && smem_bytes <= kConfig.max_smem &&
                 whole_vectors({p.x, p.dy, p.weight, p.residual, p.out},
                               int64_t{p.width} * element_bytes(p.dtype));
  dispatch_element(p.dtype, [&](auto tag) {
    constexpr auto kKernel = row_norm_backward_kernel<typename decltype(tag)::Type>;
    allow_shared_memory<kKernel>(kConfig.max_smem);
    launch_kernel<kKernel>(p.blocks, threads, p.vectorised ? static_cast<int>(smem_bytes) : 0,
                           stream, p);
  });
}

}  // namespace flashbpt::sm80
