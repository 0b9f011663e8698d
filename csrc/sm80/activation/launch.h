#pragma once

#include <cuda_runtime_api.h>

#include "../../activation.h"
#include "../../params.h"

namespace flashbpt::sm80 {

// All tensors hold `count` contiguous elements.
struct ActivationParams {
  void* gate = nullptr;  // null: the function of `up` itself
  void* up = nullptr;
  void* out = nullptr;  // backward: holds the gradient of the output, becomes the output
  int64_t count = 0;
  Activation function = Activation::kSilu;
  DataType dtype = DataType::kFloat32;
  bool vectorised = false;  // set by the launch
};

// out = function(gate) * up
void launch_activation_forward(ActivationParams p, cudaStream_t stream);

// gate and up become their gradients, out the output.
void launch_activation_backward(ActivationParams p, cudaStream_t stream);

}  // namespace flashbpt::sm80
