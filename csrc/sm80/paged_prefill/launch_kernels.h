// The kernels of one element type; a translation unit each, so that they compile side by side.
#pragma once

#include "../attn_fwd/schedule.h"
#include "../paged_keys.h"
#include "launch.h"

namespace flashbpt::sm80 {

struct PagedPrefillKernelParams : AttnFwdKernelParams {
  static constexpr bool kPaged = true;
  PagedKeys pages;
};

void launch_paged_prefill_bf16(size_t row, unsigned blocks, const PagedPrefillKernelParams& p,
                               cudaStream_t stream);
void launch_paged_prefill_fp16(size_t row, unsigned blocks, const PagedPrefillKernelParams& p,
                               cudaStream_t stream);

}  // namespace flashbpt::sm80
