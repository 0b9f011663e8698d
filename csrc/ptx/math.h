// Approximations of the special function unit.
#pragma once

namespace flashbpt::ptx {

// 2^x, 2 ulp; exp2(-inf) = 0 (PTX ISA 9.7.3.21, ex2.approx).
__device__ inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), 2^-22 absolute near 1, else relative; of 0: -inf (PTX ISA 9.7.3.20, lg2.approx).
__device__ inline float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, 1 ulp (PTX ISA 9.7.3.14, rcp.approx).
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x), relative error 2^-11 (PTX ISA 9.7.3.22, tanh.approx).
__device__ inline float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashbpt::ptx
