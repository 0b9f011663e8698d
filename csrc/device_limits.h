// What kernels are chosen by: the device of a tensor, and a limit that tests set.
#pragma once

#include <ATen/core/Tensor.h>

#ifdef FLASHBPT_WITH_CUDA
#include "sm80/attn_params.h"
#endif

namespace flashbpt {

// Kernels are chosen as on a GPU with so much shared memory a block; 0: no limit.
void limit_shared_memory(int64_t bytes);

#ifdef FLASHBPT_WITH_CUDA
DeviceLimits device_limits(const at::Tensor& t);
#endif

}  // namespace flashbpt
