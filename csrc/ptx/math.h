// Approximations of the special function unit.
#pragma once

#include <cstdint>

namespace flashbpt::ptx {

// 2^x, 2 ulp; exp2(-inf) = 0 (PTX ISA 9.7.3.21, ex2.approx).
__device__ inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x rounded to the 10 bits of mantissa that the tensor cores see of fp32; infinities and NaN stay
// (PTX ISA 9.7.9.21, cvt.rna.tf32).
__device__ inline uint32_t round_to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// 1 / x, 1 ulp (PTX ISA 9.7.3.14, rcp.approx).
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashbpt::ptx
