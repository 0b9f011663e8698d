// Division: rounded up, and by a number that the host knows, as a multiplication.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flashbpt {

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// n / value for n < 2^31 (Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994): three instructions where a division takes about twenty, one after the
// other, before a block's first copy.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int64_t value) : value_(static_cast<uint32_t>(value)) {  // below 2^31
    if (value_ < 2) return;
    while ((uint64_t{1} << shift_) < value_) ++shift_;
    const uint64_t power = uint64_t{1} << (31 + shift_);
    multiplier_ = static_cast<uint32_t>((power + value_ - 1) / value_);
    --shift_;
  }

  FLASHBPT_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    if (value_ < 2) return n;
    return static_cast<uint32_t>(uint64_t{n} * multiplier_ >> 32) >> shift_;
  }
  FLASHBPT_HOST_DEVICE uint32_t remainder(uint32_t n) const { return n - quotient(n) * value_; }
  FLASHBPT_HOST_DEVICE uint32_t value() const { return value_; }

 private:
  uint32_t value_ = 1;
  uint32_t multiplier_ = 0;
  uint32_t shift_ = 0;
};

}  // namespace flashbpt
