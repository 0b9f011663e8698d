// Which rows of a transformer block are computed together.
#pragma once

#include <ATen/core/Tensor.h>

#include "blockwise.h"

namespace flashbpt {

// Sequences whose keys and values are in memory at the same time: one long one, several that fit a
// block of rows together, or all that are packed.
struct BlockGroup {
  int64_t first;      // sequence; packed: 0
  int64_t sequences;  // packed: 1, the rows of all
  int64_t length;     // rows of a sequence
  int64_t token;      // the first row among all tokens

  int64_t tokens() const { return sequences * length; }
};

// Rows [begin, begin + count) of each sequence of a group: of more than one sequence all rows.
struct RowBlock {
  int64_t begin, count;
  int64_t end() const { return begin + count; }
};

// The rows of a call, cut.
class BlockRows {
 public:
  BlockRows(const BlockInputs& inputs, const BlockConfig& config);

  int64_t batch, length, tokens;  // packed: 1 sequence of all tokens
  bool packed;

  template <typename F>
  void for_each_group(F f) const {
    if (length == 0) return;
    const int64_t together = length < rows_ ? rows_ / length : 1;
    for (int64_t first = 0; first < batch; first += together) {
      const int64_t sequences = std::min(together, batch - first);
      f(BlockGroup{first, sequences, length, first * length});
    }
  }
  // From the first rows to the last, or from the last to the first: then all later queries have
  // had their turn, so that the gradients of a block's own keys and values are complete.
  template <typename F>
  void for_each_block(const BlockGroup& group, bool descending, F f) const {
    const int64_t blocks = (group.length + rows_ - 1) / rows_;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t begin = (descending ? blocks - 1 - i : i) * rows_;
      f(RowBlock{begin, std::min(rows_, group.length - begin)});
    }
  }

  // The block before one; count 0: it is the first.
  RowBlock before(const RowBlock& b) const {
    const int64_t begin = std::max<int64_t>(b.begin - rows_, 0);
    return {begin, b.begin - begin};
  }

 private:
  int64_t rows_;
};

}  // namespace flashbpt
