#pragma once

#include <cuda_runtime_api.h>

#include "../../attention/mask_tiles.h"
#include "../../params.h"

namespace flashbpt::sm90 {

// Why the kernels do not serve a call whose tensors are in bf16 or fp16; null where they do.
const char* attn_fwd_refusal(const AttentionParams& p, const DeviceLimits& device);

// Name of the row of config.h that serves the call, as in "attn_fwd_bf16_d128".
const char* attn_fwd_kernel(const AttentionParams& p);

// mask_tiles: of a boolean mask. counters: see AttnFwdKernelParams. Nothing is launched for an
// empty output.
void launch_attn_fwd(const AttentionParams& p, const MaskTiles& mask_tiles,
                     const DeviceLimits& device, int32_t* counters, cudaStream_t stream);

}  // namespace flashbpt::sm90
