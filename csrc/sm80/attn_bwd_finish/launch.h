#pragma once

#include "../attn_params.h"

namespace flashbpt::sm80 {

// dq = scale * dq_acc in q's type and dq's strides; rows outside every sequence are left alone.
void launch_attn_bwd_finish(const AttnBwdParams& p, cudaStream_t stream);

}  // namespace flashbpt::sm80
