// Which tiles of a row (or column) of tiles a boolean mask leaves empty, partial or full.
#pragma once

#include <cstdint>

namespace flashbpt {

// The states of 32 tiles in two registers, the same in every lane: looking at a tile costs a shift,
// and finding the next one that is not empty a count of zeros. `state(tile)` gives bit 0 where any
// element of the tile is true, bit 1 where all are. Without a mask every tile is full.
class MaskWindow {
 public:
  // The first tile at or after `tile` and before `end` that is not empty; `end` if there is none.
  template <typename State>
  __device__ int next(int tile, int end, bool masked, State state) {
    while (masked && tile < end) {
      if (tile < first_ || tile >= first_ + 32) fill(tile, end, state);
      const uint32_t left = any_ >> (tile - first_);
      if (left != 0) {
        tile += __ffs(left) - 1;
        break;
      }
      tile = first_ + 32;
    }
    return tile < end ? tile : end;
  }
  // Of a tile that `next` has just returned.
  __device__ bool full(int tile) const { return all_ >> (tile - first_) & 1; }

 private:
  template <typename State>
  __device__ void fill(int first, int end, State state) {
    const int tile = first + threadIdx.x % 32;
    const int bits = tile < end ? state(tile) : 0;
    first_ = first;
    any_ = __ballot_sync(0xffffffffu, bits & 1);
    all_ = __ballot_sync(0xffffffffu, bits & 2);
  }

  int first_ = -(1 << 30);
  uint32_t any_ = 0xffffffffu;
  uint32_t all_ = 0xffffffffu;
};

}  // namespace flashbpt
