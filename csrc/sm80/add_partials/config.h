// The numbers of the add_partials kernel.
#pragma once

namespace flashbpt::sm80 {

// A block takes `columns` columns, 128 bytes of a row, and has `row_groups` rows of partial sums
// under way. The sums were written just before and lie in L2: latency binds.
struct AddPartialsConfig {
  int columns;
  int row_groups;

  constexpr int block_threads() const { return columns * row_groups; }
  constexpr int smem_bytes() const { return row_groups * (columns + 1) * 4; }
};
inline constexpr AddPartialsConfig kAddPartialsConfig = {32, 32};

// Rows and columns change places between the two halves of the sum.
static_assert(kAddPartialsConfig.columns == 32 && kAddPartialsConfig.row_groups == 32);

}  // namespace flashbpt::sm80
