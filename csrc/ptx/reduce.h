// Additions to global memory, and turns between blocks.
#pragma once

#include <cstdint>

namespace flashbpt::ptx {

// *dst += x for four neighbours, dst aligned to 16 bytes (PTX ISA 9.7.13.14, red). The vector form
// exists from sm_90 on.
__device__ inline void red_add_f32x4(float* dst_gmem, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dst_gmem), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(dst_gmem + i), "f"(x[i]) : "memory");
  }
#endif
}

__device__ inline void red_add_f32(float* dst_gmem, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(dst_gmem), "f"(x) : "memory");
}

// What other blocks wrote before they released `flag` is visible after (PTX ISA 8.8, acquire).
__device__ inline int32_t load_acquire(const int32_t* flag_gmem) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag_gmem) : "memory");
  return value;
}

// And what this block's threads wrote before a __syncthreads() is visible to who finds the sum
// there. Returns what was there.
__device__ inline int32_t add_acquire_release(int32_t* word_gmem, int32_t x) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word_gmem), "r"(x)
               : "memory");
  return before;
}

__device__ inline void add_release(int32_t* flag_gmem, int32_t x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(flag_gmem), "r"(x) : "memory");
}

}  // namespace flashbpt::ptx
