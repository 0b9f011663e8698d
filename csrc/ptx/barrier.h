// Barriers among some warps of a block.
#pragma once

#include <cstdint>

namespace flashbpt::ptx {

// Waits until `threads` threads, whole warps, are at barrier `id` of 1 ... 15 (PTX ISA 9.7.13.1,
// barrier); 0 is __syncthreads. Orders their accesses to shared memory.
__device__ inline void barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same without waiting: lets those go on who wait there.
__device__ inline void barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flashbpt::ptx
