// In which order blocks take tiles: longest first, and so that what runs together shares the cache.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flashbpt {

// Heads go in sections whose keys and values (or queries and their gradients) fit the L2 cache
// together; within a section all heads of one tile come first, and tiles from the longest to the
// shortest. Without sections "longest first" would have every head's keys in use at once.
// Blocks are numbered in 32 bits, and so is everything here: each of 32-bit divisions before a
// block's first copy costs a quarter of a 64-bit one.
struct TileOrder {
  uint32_t tiles;    // of one head
  uint32_t heads;    // of all batch elements
  uint32_t section;  // heads of one section
  bool last_first;   // the last tile of a head is the longest

  struct Place {
    uint32_t head;
    uint32_t tile;
  };

  FLASHBPT_HOST_DEVICE Place at(uint32_t index) const {
    const uint32_t first_head = index / (section * tiles) * section;
    const uint32_t here = heads - first_head < section ? heads - first_head : section;
    const uint32_t rest = index - first_head * tiles;
    const uint32_t tile = rest / here;
    return {first_head + rest % here, last_first ? tiles - 1 - tile : tile};
  }

  static TileOrder make(int64_t tiles, int64_t heads, int64_t heads_that_share,
                        int64_t bytes_shared, int64_t l2_bytes, bool last_first) {
    const int64_t fit = l2_bytes / 2 / (bytes_shared > 0 ? bytes_shared : 1);
    const int64_t section = heads_that_share * (fit > 0 ? fit : 1);
    return {static_cast<uint32_t>(tiles), static_cast<uint32_t>(heads),
            static_cast<uint32_t>(section < heads ? section : heads), last_first};
  }
};

}  // namespace flashbpt
