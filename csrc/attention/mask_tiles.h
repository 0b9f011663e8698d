// Which parts of a boolean mask are empty or full.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flashbpt {

// What is known of a boolean mask, 64 queries x 16 keys at a time: bit 0 where any element of the
// piece is true, bit 1 where all are (elements past the end count neither way).
struct MaskTiles {
  static constexpr int kRows = 64;
  static constexpr int kCols = 16;

  const uint8_t* data = nullptr;  // [batch, head, len_q / 64, len_k / 16], contiguous columns
  int64_t batch = 0;              // strides; 0 where the mask is broadcast
  int64_t head = 0;
  int64_t row = 0;
  int64_t col = 0;

  // The same two bits of kRowParts x kColParts pieces, from piece (row_part, col_part) on.
  template <int kRowParts, int kColParts>
  FLASHBPT_HOST_DEVICE int state(int64_t b, int64_t h, int64_t row_part, int64_t col_part,
                                 int64_t len_q, int64_t len_k) const {
    const uint8_t* first = data + b * batch + h * head;
    int any = 0, all = 2;
    for (int r = 0; r < kRowParts; ++r)
      for (int c = 0; c < kColParts; ++c) {
        if ((row_part + r) * kRows >= len_q || (col_part + c) * kCols >= len_k) continue;
        const int bits = first[(row_part + r) * row + (col_part + c) * col];
        any |= bits;
        all &= bits;
      }
    return (any & 1) | all;
  }
};

}  // namespace flashbpt
