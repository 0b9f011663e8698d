// The scores of one tile, with everything that DESIGN calls the order of terms: scale, softcap,
// ALiBi, additive mask, then boolean mask, causal and window.
#pragma once

#include "tiles.h"

namespace flashbpt::cpu {

// Visible columns of one row within a key tile; nothing outside is ever looked at.
struct Columns {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

inline Columns visible_columns(const AttentionParams& p, const Sequence& seq, KeyTile k,
                               int64_t row) {
  const KeyRange r = p.band.of_row(row, seq.shift, seq.len_k);
  const int64_t begin = std::clamp<int64_t>(r.begin - k.begin, 0, k.cols);
  return {begin, std::clamp<int64_t>(r.end - k.begin, begin, k.cols)};
}

// Zero outside the visible columns: what P and dS hold there.
template <typename T>
void clear_hidden(T* row, Columns c, int64_t cols) {
  std::fill(row, row + c.begin, T(0));
  std::fill(row + c.end, row + cols, T(0));
}

// Keys that at least one row of the tile sees by causal and window.
KeyRange visible_keys(const AttentionParams& p, const QueryTile& q);

// false where a boolean mask leaves the whole tile without keys.
bool mask_allows_any(const AttentionParams& p, const QueryTile& q, KeyTile k);

// s [flat_rows, cols]: the final scores; -inf where the boolean mask forbids; columns outside
// `visible_columns` are undefined. tanh [flat_rows, cols] (null unless asked for and softcap > 0)
// receives tanh(score / softcap), which the backward needs.
template <typename T>
void score_tile(const AttentionParams& p, const QueryTile& q, KeyTile k, const at::Tensor& query,
                const at::Tensor& key, T* s, T* tanh);

// keep [flat_rows, cols]: the dropout mask of the tile.
void keep_tile(const AttentionParams& p, const QueryTile& q, KeyTile k, uint8_t* keep);

}  // namespace flashbpt::cpu
