// The numbers of the merge_states kernel, one row an element type.
#pragma once

#include "../../params.h"

namespace flashbpt::sm80 {

struct MergeStatesConfig {
  int element_bytes;      // of the outs
  int accumulator_bytes;  // of sums, weights and lses
  int block_threads;
  int vector_bytes;      // of one load of an out row
  int thread_vectors;    // loads of one out row a thread has under way
  int states_in_flight;  // states a thread loads from at a time
  int min_blocks;        // a multiprocessor holds at least so many: the register budget

  constexpr int vector_elements() const { return vector_bytes / element_bytes; }
  constexpr int smem_bytes() const { return 0; }
  // 32-bit registers a thread of running sums and of loads under way.
  constexpr int acc_regs() const {
    return (thread_vectors * vector_elements() * accumulator_bytes +
            states_in_flight * (thread_vectors * vector_bytes + accumulator_bytes)) /
           4;
  }
  constexpr int reg_budget() const { return 65536 / (block_threads * min_blocks); }
  // Bytes that a full multiprocessor keeps under way while two states are merged.
  constexpr int bytes_in_flight() const {
    return block_threads * min_blocks * 2 * thread_vectors * vector_bytes;
  }
};

struct MergeStatesKernel {
  const char* name;
  DataType dtype;
  MergeStatesConfig config;
};

// Memory-bound: HBM3e at 4.2 TB/s and about 800 ns wants 26 KB under way on each of 132
// multiprocessors, most easily missed where only two states are merged. Registers limit the threads
// that can be there; they go to 64-bit addresses and, in the path for single elements, to as many
// columns a thread as a vector has. 5 blocks leave 102 a thread, and at 6 (80) nothing is left over
// for a compiler that allocates a little worse: a spill fails the build.
//                              element accumulator threads vector vectors states blocks
inline constexpr MergeStatesKernel kMergeStatesKernels[] = {
    {"merge_states_bf16", DataType::kBFloat16, {2, 4, 128, 16, 2, 2, 5}},
    {"merge_states_fp16", DataType::kFloat16, {2, 4, 128, 16, 2, 2, 5}},
    {"merge_states_fp32", DataType::kFloat32, {4, 4, 128, 16, 2, 2, 5}},
    {"merge_states_fp64", DataType::kFloat64, {8, 8, 128, 16, 2, 2, 5}},
};

constexpr MergeStatesConfig merge_states_config(DataType dtype) {
  for (const MergeStatesKernel& kernel : kMergeStatesKernels)
    if (kernel.dtype == dtype) return kernel.config;
  return {};
}

constexpr bool merge_states_configs_fit() {
  for (const MergeStatesKernel& kernel : kMergeStatesKernels) {
    const MergeStatesConfig& c = kernel.config;
    // 24 registers are left for addresses, the row index and the arithmetic of one step.
    if (c.acc_regs() + 24 > c.reg_budget()) return false;
    if (c.bytes_in_flight() < 26 * 1024) return false;
    if (c.block_threads % 32 != 0 || c.vector_bytes % c.element_bytes != 0) return false;
  }
  return true;
}
static_assert(merge_states_configs_fit(), "a row of kMergeStatesKernels exceeds its budget");

}  // namespace flashbpt::sm80
