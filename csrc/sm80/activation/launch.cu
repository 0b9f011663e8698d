#include "launch.h"

#include "../../dispatch_element.h"
#include "../../launch_kernel.h"
#include "../whole_vectors.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {
namespace {

template <auto kKernel>
void launch(ActivationParams p, const ActivationConfig& config, cudaStream_t stream) {
  p.vectorised = whole_vectors({p.gate, p.up, p.out}, 0);
  const int64_t block_bytes = config.block_threads * config.thread_vectors * config.vector_bytes;
  const int64_t elements = block_bytes / element_bytes(p.dtype);
  const int64_t blocks = (p.count + elements - 1) / elements;
  launch_kernel<kKernel>(blocks, config.block_threads, 0, stream, p);
}

}  // namespace

void launch_activation_forward(ActivationParams p, cudaStream_t stream) {
  dispatch_element(p.dtype, [&](auto tag) {
    launch<activation_forward_kernel<typename decltype(tag)::Type>>(p, kActivationForwardConfig,
                                                                    stream);
  });
}

void launch_activation_backward(ActivationParams p, cudaStream_t stream) {
  dispatch_element(p.dtype, [&](auto tag) {
    launch<activation_backward_kernel<typename decltype(tag)::Type>>(p, kActivationBackwardConfig,
                                                                     stream);
  });
}

}  // namespace flashbpt::sm80
