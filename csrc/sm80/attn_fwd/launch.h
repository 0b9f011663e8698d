#pragma once

#include "../attn_params.h"

namespace flashbpt::sm80 {

// Name of the row of config.h that serves the call, as in "attn_fwd_bf16_d128".
const char* attn_fwd_kernel(const AttentionParams& p, const DeviceLimits& device);

// In how many parts the keys should be split so that the device is full; 1 for most calls.
int attn_fwd_splits(const AttentionParams& p, const DeviceLimits& device);

// p.q.dtype: fp32, bf16 or fp16; every pointer on the current device. Nothing is launched for an
// empty output.
void launch_attn_fwd(const AttnFwdParams& p, const DeviceLimits& device, cudaStream_t stream);

}  // namespace flashbpt::sm80
