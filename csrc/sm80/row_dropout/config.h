// The numbers of the row_dropout kernel.
#pragma once

namespace flashbpt::sm80 {

struct RowDropoutConfig {
  int block_threads;
  int width;       // elements of a row that a thread takes: two calls of Philox
  int min_blocks;  // a multiprocessor holds at least so many: the register budget

  constexpr int reg_budget() const { return 65536 / (block_threads * min_blocks); }
  // In 16-bit types: x and residual.
  constexpr int bytes_in_flight() const { return block_threads * min_blocks * width * 2 * 2; }
};

// Memory-bound: 4.2 TB/s and 800 ns want 26 KB under way on a multiprocessor. Registers limit the
// threads: 4 blocks of 256 leave 64 a thread.
//                                                    threads width blocks
inline constexpr RowDropoutConfig kRowDropoutConfig = {256, 8, 4};

static_assert(kRowDropoutConfig.width == 8 && kRowDropoutConfig.bytes_in_flight() >= 26 * 1024);

}  // namespace flashbpt::sm80
