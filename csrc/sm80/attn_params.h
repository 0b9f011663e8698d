// What the attention kernels of sm80 take beyond the params that every backend shares.
#pragma once

#include <cuda_runtime_api.h>

#include "../attention/divisor.h"
#include "../attention/mask_tiles.h"
#include "../attention/score_unit.h"
#include "../attention/sequence.h"
#include "../params.h"
#include "../row_access.h"

namespace flashbpt::sm80 {

// The tensors of a call as the kernels copy them: every row starts at a multiple of so many bytes.
struct RowAccess {
  int q, k, v, out, mask;
};

// Keys of a row in parts, each with its own O (normalised) and LSE, to be merged; part 0 carries
// the sink.
struct KeySplits {
  int32_t count = 1;  // 1: O and LSE go to the call's at once
  TensorView out;     // of part 0, fp32, in the shape of the call's
  TensorView lse;
  int64_t out_stride = 0;  // from part to part
  int64_t lse_stride = 0;
};

struct AttnFwdParams : AttentionParams {
  MaskTiles mask_tiles;  // data is null without a boolean mask
  bool tf32 = false;     // fp32 inputs: single TF32 products are allowed
  KeySplits splits;
};

// Rows as the kernels of the backward hand them to each other: every sequence starts at a multiple
// of kRowPad, which is no less than the rows of a step. Dense: [batch * heads_q, padded_rows];
// packed: [heads_q, padded_rows].
constexpr int64_t kRowPad = 128;
constexpr int64_t kTurnRows = 8;

inline FLASHBPT_HOST_DEVICE int64_t padded_rows(const AttentionParams& p) {
  const int64_t rows = (p.len_q + kRowPad - 1) / kRowPad * kRowPad;
  return p.packed() ? rows + kRowPad * p.batch : rows;
}
inline FLASHBPT_HOST_DEVICE int64_t padded_row_begin(const AttentionParams& p, const Sequence& s) {
  return p.packed() ? (s.q_begin + kRowPad * s.batch) / kRowPad * kRowPad : 0;
}
inline FLASHBPT_HOST_DEVICE int64_t padded_head(const AttentionParams& p, int64_t b, int64_t h) {
  return p.packed() ? h : b * p.heads_q + h;
}
inline FLASHBPT_HOST_DEVICE int64_t padded_heads(const AttentionParams& p) {
  return p.packed() ? p.heads_q : p.batch * p.heads_q;
}

// dq before scale and rounding: fp32 in the order of mma fragments, so that a lane adds four
// neighbours at once. Pieces of 16 rows x 8 columns, [heads, padded_rows / 16, dim / 8, 32, 4]:
// lane 4 * (row % 8) + (col % 8) / 2 of a piece holds rows {row, row + 8} x cols {col, col + 1}.
inline FLASHBPT_HOST_DEVICE int64_t dq_acc_pieces(int64_t dim) {
  return (dim + 7) / 8;
}

struct AttnBwdParams : AttentionBackwardParams {
  MaskTiles mask_tiles;
  bool tf32 = false;
  bool deterministic = false;

  // Written by attn_bwd_prepare, [padded_heads, padded_rows]. Rows without keys and rows past the
  // end have row_lse = +inf and row_delta = 0, so that their P is 0.
  float* row_lse = nullptr;     // natural logarithm
  float* row_lse_lo = nullptr;  // null without an additive mask
  float* row_delta = nullptr;   // rowsum(dO * O) - dLSE

  float* dq_acc = nullptr;  // zeroed by attn_bwd_prepare; null where dq is not asked for
  // Deterministic: how many key tiles have added to a piece of dq_acc; zeroed likewise,
  // [padded_heads, padded_rows / kTurnRows]. Null otherwise.
  int32_t* dq_turns = nullptr;
  // dk and dv are fp32 and added into (atomically where q_splits > 1); else written in q's type.
  bool accumulate = false;
  int32_t q_splits = 1;  // blocks that share the queries of one key tile; needs accumulate
};

}  // namespace flashbpt::sm80
