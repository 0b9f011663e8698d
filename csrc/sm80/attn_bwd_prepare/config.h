// The numbers of the attn_bwd_prepare kernel.
#pragma once

#include "../attn_params.h"

namespace flashbpt::sm80 {

struct AttnBwdPrepareConfig {
  int block_threads;
  int vector_bytes;    // of one load
  int thread_vectors;  // of O and of dO each that a thread has under way
  int min_lanes;       // of a row, which leaves no warp of the block without rows
  int min_blocks;      // a multiprocessor holds at least so many: the register budget

  // rowsum(dO * O), and the sums of dsinks of each warp's rows.
  constexpr int smem_bytes() const { return (kRowPad + kRowPad / 32) * 4; }
  constexpr int acc_regs() const { return 2 * thread_vectors * vector_bytes / 4 + 1; }
  constexpr int reg_budget() const { return 65536 / (block_threads * min_blocks); }
  constexpr int bytes_in_flight() const {
    return min_blocks * block_threads * 2 * thread_vectors * vector_bytes;
  }
};

// Memory-bound: 4.2 TB/s and 800 ns want 26 KB under way on a multiprocessor. Registers limit the
// threads: 4 blocks of 256 leave 64 a thread.
//                                                              threads vector vectors lanes blocks
inline constexpr AttnBwdPrepareConfig kAttnBwdPrepareConfig = {256, 16, 2, 4, 4};

constexpr bool attn_bwd_prepare_config_fits() {
  const AttnBwdPrepareConfig& c = kAttnBwdPrepareConfig;
  // 24 registers are left for addresses and the arithmetic of one step.
  return c.acc_regs() + 24 <= c.reg_budget() && c.bytes_in_flight() >= 26 * 1024 &&
         c.block_threads / c.min_lanes <= kRowPad && kRowPad % (c.block_threads / 32) == 0 &&
         c.block_threads >= kRowPad;
}
static_assert(attn_bwd_prepare_config_fits());

}  // namespace flashbpt::sm80
