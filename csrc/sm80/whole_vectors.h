// Whether rows are read and written 16 bytes at a time.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace flashbpt::sm80 {

// Contiguous rows of `row_bytes` at these addresses (null: none) are whole vectors of 16 bytes.
inline bool whole_vectors(std::initializer_list<const void*> addresses, int64_t row_bytes) {
  uint64_t bits = static_cast<uint64_t>(row_bytes);
  for (const void* address : addresses) bits |= reinterpret_cast<uint64_t>(address);
  return bits % 16 == 0;
}

}  // namespace flashbpt::sm80
