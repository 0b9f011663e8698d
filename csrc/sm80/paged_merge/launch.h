#pragma once

#include "../paged_decode/launch.h"

namespace flashbpt::sm80 {

// The items that paged_decode left in parts, out and lse.
void launch_paged_merge(const PagedDecodeParams& p, const DeviceLimits& device,
                        cudaStream_t stream);

}  // namespace flashbpt::sm80
