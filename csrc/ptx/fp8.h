// 8-bit floating-point numbers to pairs of fp16 (PTX ISA 9.7.9.22, cvt).
#pragma once

#include <cstdint>

namespace flashbpt::ptx {

// Bytes `low` and `high` of x as the low and high halves of a pair of fp16; both formats fit it
// exactly. e5m2 is the upper byte of fp16.
template <int kLow, int kHigh>
__device__ inline uint32_t e5m2_pair(uint32_t x) {
  return __byte_perm(x, 0, 4 | kLow << 4 | 4 << 8 | kHigh << 12);
}

// e4m3: before sm_89 the number in fp16's place, 2^8 too small, and NaN by hand.
template <int kLow, int kHigh>
__device__ inline uint32_t e4m3_pair(uint32_t x) {
#if __CUDA_ARCH__ >= 890
  const uint16_t two = static_cast<uint16_t>(__byte_perm(x, 0, kLow | kHigh << 4));
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
  return pair;
#else
  const uint32_t shifted = e5m2_pair<kLow, kHigh>(x);
  const uint32_t number = (shifted >> 1 & 0x3f803f80u) | (shifted & 0x80008000u);
  uint32_t pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(number), "r"(0x5c005c00u));  // times 256
  if ((shifted & 0x7f00u) == 0x7f00u) pair |= 0x7fffu;
  if ((shifted & 0x7f000000u) == 0x7f000000u) pair |= 0x7fff0000u;
  return pair;
#endif
}

}  // namespace flashbpt::ptx
