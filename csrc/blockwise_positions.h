// Where the rows of a transformer block are in their sequences, and how far rope turns them.
#pragma once

#include "blockwise.h"
#include "blockwise_rows.h"

namespace flashbpt {

class BlockPositions {
 public:
  // options: of rows on the device.
  BlockPositions(const BlockInputs& inputs, const BlockConfig& config, const BlockRows& rows,
                 int64_t dim, const at::TensorOptions& options);

  // The angles of a block's rows: from the given tables, or theta^(-2 j / dim) * position.
  Rope rope(const BlockGroup& group, const RowBlock& block) const;

  // Packed rows past the last sequence: bool [tokens, 1]; undefined for dense rows.
  at::Tensor padding;

 private:
  at::Tensor rows_of(const at::Tensor& table, const at::Tensor& positions) const;

  const BlockInputs& in_;
  const BlockConfig& c_;
  const int64_t dim_;
  const at::TensorOptions options_;
  at::Tensor packed_;  // int64 [tokens]: places of packed rows in their sequences
};

}  // namespace flashbpt
