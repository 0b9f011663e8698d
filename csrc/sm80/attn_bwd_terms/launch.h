#pragma once

#include "../attn_params.h"

namespace flashbpt::sm80 {

// Entries along `row` of dalibi, [partials, batch, heads_q]: one a block that adds to it.
int64_t attn_bwd_terms_partials(const AttentionParams& p, const DeviceLimits& device);

// Gradients of the terms that are added to the scores: dmask (fp32, mask's own shape, summed over
// whatever the mask is broadcast over) and dalibi (partials), both zeroed. A block owns a piece of
// them and visits every score that the piece is added to, so that sums have one order; only where
// the pieces of dmask are too few for the device and the call is not deterministic do blocks share
// one.
void launch_attn_bwd_terms(const AttnBwdParams& p, const DeviceLimits& device, cudaStream_t stream);

}  // namespace flashbpt::sm80
