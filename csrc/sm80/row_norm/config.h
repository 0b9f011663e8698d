// The numbers of the row_norm kernels.
#pragma once

#include <cstdint>

namespace flashbpt::sm80 {

struct RowNormConfig {
  int vector_bytes;
  int thread_bytes;   // of a row that a thread holds
  int max_threads;    // of a row: wider rows are read again in each pass
  int block_threads;  // narrow rows share a block
  int min_blocks;     // of max_threads: the register budget

  constexpr int reg_budget() const { return 65536 / (max_threads * min_blocks); }
  constexpr int acc_regs() const { return thread_bytes / 4; }
  constexpr int bytes_in_flight() const { return max_threads * min_blocks * thread_bytes; }
};

struct RowNormBackwardConfig {
  int vector_bytes;
  int thread_columns;  // of which a thread sums dw and db
  int max_threads;
  int sm_threads;  // so many threads a multiprocessor: the grid, and the register budget
  int stages;      // rows under way
  int max_smem;    // 99 KB on sm_86, 89 and 120: rows above it are read again in each pass

  constexpr int reg_budget() const { return 65536 / sm_threads; }
  constexpr int acc_regs() const { return 2 * thread_columns; }
  // dy, x and the residual
  constexpr int64_t smem_bytes(int64_t row_bytes) const { return stages * 3 * row_bytes; }
  // In 16-bit types; the row of each block that is computed has arrived.
  constexpr int bytes_in_flight() const {
    return (stages - 1) * 3 * sm_threads * thread_columns * 2;
  }
};

// Memory-bound: 4.2 TB/s and 800 ns want 26 KB under way on a multiprocessor, more since a row's
// threads wait for its sums. The forward gets there by many rows on a multiprocessor. The backward
// cannot, as dw and db take 32 registers a thread: it copies the next row meanwhile.
//                                                  vector thread threads block blocks
inline constexpr RowNormConfig kRowNormConfig = {16, 64, 512, 128, 2};
//                                                          vector columns threads sm stages smem
inline constexpr RowNormBackwardConfig kRowNormBackwardConfig = {16, 16, 512, 768, 2, 98304};

static_assert(kRowNormConfig.acc_regs() + 40 <= kRowNormConfig.reg_budget() &&
              kRowNormConfig.bytes_in_flight() >= 2 * 26 * 1024);
static_assert(kRowNormBackwardConfig.acc_regs() + 40 <= kRowNormBackwardConfig.reg_budget() &&
              kRowNormBackwardConfig.bytes_in_flight() >= 2 * 26 * 1024);

}  // namespace flashbpt::sm80
