// An index over two dimensions, taken apart.
#pragma once

#include "../attention/divisor.h"

namespace flashbpt::sm80 {

struct Divided {
  int64_t quotient;
  int remainder;
};

__device__ inline Divided divide(int64_t n, const Divisor& by) {
  if (n <= INT32_MAX) {
    const uint32_t quotient = by.quotient(static_cast<uint32_t>(n));
    return {quotient, static_cast<int>(n - quotient * by.value())};
  }
  return {n / by.value(), static_cast<int>(n % by.value())};
}

}  // namespace flashbpt::sm80
