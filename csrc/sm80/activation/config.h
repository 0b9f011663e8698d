// The numbers of the activation kernels.
#pragma once

namespace flashbpt::sm80 {

struct ActivationConfig {
  int block_threads;
  int vector_bytes;
  int thread_vectors;  // of each tensor that a thread reads before it computes
  int tensors;         // that are read
  int min_blocks;      // a multiprocessor holds at least so many: the register budget

  constexpr int reg_budget() const { return 65536 / (block_threads * min_blocks); }
  constexpr int acc_regs() const { return thread_vectors * tensors * vector_bytes / 4; }
  constexpr int bytes_in_flight() const { return block_threads * min_blocks * acc_regs() * 4; }
};

// Memory-bound: 4.2 TB/s and 800 ns want 26 KB under way on a multiprocessor. Registers limit the
// threads: 4 blocks of 256 leave 64 a thread.
//                                                            threads bytes vectors tensors blocks
inline constexpr ActivationConfig kActivationForwardConfig = {256, 16, 2, 2, 4};
inline constexpr ActivationConfig kActivationBackwardConfig = {256, 16, 1, 3, 4};

constexpr bool fits(const ActivationConfig& c) {
  return c.acc_regs() + 24 <= c.reg_budget() && c.bytes_in_flight() >= 26 * 1024;
}
static_assert(fits(kActivationForwardConfig) && fits(kActivationBackwardConfig));

}  // namespace flashbpt::sm80
