#include "launch.h"

#include <algorithm>
#include <bit>

#include "../../dispatch_element.h"
#include "../../launch_kernel.h"
#include "../attn_params.h"
#include "../whole_vectors.h"
#include "backward.cuh"
#include "kernel.cuh"

namespace flashbpt::sm80 {
namespace {

// Chooses lanes and whether they have pieces. x: of the backward.
void plan(RopeParams& p, const TensorView& x, const RopeConfig& config) {
  const auto aligned = [&](const TensorView& t) {
    return t.data == nullptr || row_access(t, 1, p.heads, p.rows) >= 16;
  };
  p.vectorised = aligned(p.in) && aligned(x) && aligned(p.out) && p.dim % config.unit() == 0 &&
                 p.dim <= config.max_dim() && p.pairs % config.piece == 0 &&
                 whole_vectors({p.weight, p.cos, p.sin}, 0);
  if (p.vectorised) p.lanes = std::bit_ceil(static_cast<unsigned>(p.dim / config.unit()));
  const int heads = p.vectorised ? config.heads(element_bytes(p.out.dtype)) : 1;
  p.share = 1.0f / static_cast<float>(p.dim);
  p.row_places = Divisor(ceil_div(p.heads, heads));
}

// Of a launch in which each thread has one place.
int64_t most_blocks(int64_t places, int lanes, const RopeConfig& config) {
  const int64_t at_once = config.block_threads / lanes;
  return std::min<int64_t>(ceil_div(places, at_once), INT32_MAX);
}

}  // namespace

void launch_rope(RopeParams p, cudaStream_t stream) {
  constexpr RopeConfig kConfig = kRopeConfig;
  plan(p, {}, kConfig);
  const int64_t blocks = most_blocks(p.rows * p.row_places.value(), p.lanes, kConfig);
  dispatch_element(p.out.dtype, [&](auto tag) {
    launch_kernel<rope_kernel<typename decltype(tag)::Type>>(blocks, kConfig.block_threads, 0,
                                                             stream, p);
  });
}

int rope_blocks(const RopeParams& p, int multiprocessors) {
  const RopeConfig& config = rope_backward_config(element_bytes(p.out.dtype));
  return static_cast<int>(std::min(most_blocks(p.rows * p.heads, 32, config),
                                   int64_t{multiprocessors} * config.min_blocks));
}

void launch_rope_backward(RopeBackwardParams p, cudaStream_t stream) {
  if (p.weight == nullptr && p.in.dtype == p.out.dtype) {
    p.sign = -1;
    return launch_rope(p, stream);
  }
  const RopeConfig& config = rope_backward_config(element_bytes(p.out.dtype));
  plan(p, p.x, config);
  const bool sums = p.weight_partials != nullptr;
  const int64_t blocks =
      sums ? p.blocks : most_blocks(p.rows * p.row_places.value(), p.lanes, config);
  dispatch_element(p.out.dtype, [&](auto tag) {
    constexpr auto kKernel = rope_backward_kernel<typename decltype(tag)::Type>;
    allow_shared_memory<kKernel>(config.smem_bytes(32, kRopeMaxNormDim));
    launch_kernel<kKernel>(blocks, config.block_threads,
                           sums ? config.smem_bytes(p.lanes, p.dim) : 0, stream, p);
  });
}

}  // namespace flashbpt::sm80
