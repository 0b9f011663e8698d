#pragma once

#include <cuda_runtime_api.h>

#include "../../attention/mask_tiles.h"
#include "../../paged_params.h"

namespace flashbpt::sm90 {

// Why the kernels do not serve a call whose tensors are in bf16 or fp16; null where they do.
const char* attn_fwd_refusal(const AttentionParams& p, const DeviceLimits& device);

// Name of the row of config.h that serves the call, as in "attn_fwd_bf16_d128".
const char* attn_fwd_kernel(const AttentionParams& p);

// mask_tiles: of a boolean mask. counters: see AttnFwdKernelParams. Nothing is launched for an
// empty output.
void launch_attn_fwd(const AttentionParams& p, const MaskTiles& mask_tiles,
                     const DeviceLimits& device, int32_t* counters, cudaStream_t stream);

// The same over paged caches, for requests of more than few_rows rows; others' rows stay untouched.
const char* paged_prefill_refusal(const PagedParams& p, const DeviceLimits& device);
const char* paged_prefill_kernel(const PagedParams& p);
void launch_paged_prefill(const PagedParams& p, int few_rows, const DeviceLimits& device,
                          int32_t* counters, cudaStream_t stream);

}  // namespace flashbpt::sm90
