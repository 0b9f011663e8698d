// Asynchronous copies from global to shared memory (PTX ISA 9.7.9.25.3, cp.async).
#pragma once

#include <cstdint>

namespace flashbpt::ptx {

// Copies 16 bytes past L1.
__device__ inline void cp_async_16(uint32_t dst_smem, const void* src_gmem) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst_smem), "l"(src_gmem)
               : "memory");
}

// Of the source only the first `bytes` are read, the rest becomes zero.
__device__ inline void cp_async_16(uint32_t dst_smem, const void* src_gmem, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst_smem), "l"(src_gmem),
               "r"(bytes)
               : "memory");
}

// The same for 4 bytes, for rows that are aligned no better.
__device__ inline void cp_async_4(uint32_t dst_smem, const void* src_gmem, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst_smem), "l"(src_gmem),
               "r"(bytes)
               : "memory");
}

// How the L2 cache is to treat what a copy reads (PTX ISA 9.7.9.18, createpolicy): lines that are
// read once leave it first, before those of code, tables and results.
__device__ inline uint64_t read_once_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline void cp_async_16(uint32_t dst_smem, const void* src_gmem, int bytes,
                                   uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst_smem),
               "l"(src_gmem), "r"(bytes), "l"(policy)
               : "memory");
}

__device__ inline void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashbpt::ptx
