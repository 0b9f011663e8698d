// The numbers of the attn_bwd_finish kernel.
#pragma once

#include "../attn_params.h"

namespace flashbpt::sm80 {

struct AttnBwdFinishConfig {
  int block_threads;
  int vector_bytes;  // of one load or store
  int min_blocks;    // a multiprocessor holds at least so many: the register budget

  constexpr int smem_bytes() const { return 0; }
  constexpr int acc_regs() const { return 2 * 8; }  // two rows x 8 columns of dq
  constexpr int reg_budget() const { return 65536 / (block_threads * min_blocks); }
  constexpr int bytes_in_flight() const { return min_blocks * block_threads * acc_regs() * 4; }
};

// Memory-bound: 4.2 TB/s and 800 ns want 26 KB under way on a multiprocessor. Registers limit the
// threads: 5 blocks of 256 leave 51 a thread.
//                                                            threads vector blocks
inline constexpr AttnBwdFinishConfig kAttnBwdFinishConfig = {256, 16, 5};

// 24 registers are left for addresses and the values on their way out.
static_assert(kAttnBwdFinishConfig.acc_regs() + 24 <= kAttnBwdFinishConfig.reg_budget() &&
              kAttnBwdFinishConfig.bytes_in_flight() >= 26 * 1024);

}  // namespace flashbpt::sm80
