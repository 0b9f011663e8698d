#pragma once

#include "../attn_params.h"

namespace flashbpt::sm80 {

const char* attn_bwd_kernel(const AttentionParams& p, const DeviceLimits& device);

// Blocks that should share the queries of one key tile so that the device is full; 1 for most.
int attn_bwd_q_splits(const AttentionParams& p, const DeviceLimits& device);

// dq_acc, dk and dv; after attn_bwd_prepare, before attn_bwd_finish.
void launch_attn_bwd(const AttnBwdParams& p, const DeviceLimits& device, cudaStream_t stream);

}  // namespace flashbpt::sm80
