#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"

namespace flashbpt::sm80 {

// keep [batch, heads_q, len_q, len_k], contiguous and not empty: the keys that dropout leaves. The
// sizes, offsets, threshold and state are those of `p`.
void launch_dropout_mask(const AttentionParams& p, bool* keep, cudaStream_t stream);

}  // namespace flashbpt::sm80
