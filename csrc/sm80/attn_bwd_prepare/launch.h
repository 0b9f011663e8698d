#pragma once

#include "../attn_params.h"

namespace flashbpt::sm80 {

// row_lse, row_lse_lo, row_delta of every padded row, zeros in its dq_acc and dq_turns where they
// are asked for, and dsinks likewise: dsinks is
// [padded_rows / kRowPad, batch, heads_q] along `row`, `batch`, `head` (packed: batch stride 0),
// each block of rows writes its own entry.
void launch_attn_bwd_prepare(const AttnBwdParams& p, cudaStream_t stream);

}  // namespace flashbpt::sm80
