// In which order blocks take tiles: longest first, and so that what runs together shares the cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "divisor.h"
#include "host_device.h"

namespace flashbpt {

// Heads go in sections whose keys and values (or queries and their gradients) fit the L2 cache
// together; within a section all heads of one tile come first, and tiles from the longest to the
// shortest. Without sections "longest first" would have every head's keys in use at once.
struct TileOrder {
  uint32_t tiles;          // of one head
  uint32_t heads;          // of all batch elements
  Divisor section;         // heads of one section
  Divisor last_section;    // and of the last one
  Divisor section_blocks;  // tiles of one section
  bool last_first;         // the last tile of a head is the longest

  struct Place {
    uint32_t head;
    uint32_t tile;
  };

  FLASHBPT_HOST_DEVICE Place at(uint32_t index) const {
    const uint32_t first_head = section_blocks.quotient(index) * section.value();
    const Divisor& here = heads - first_head < section.value() ? last_section : section;
    const uint32_t rest = index - first_head * tiles, tile = here.quotient(rest);
    return {first_head + rest - tile * here.value(), last_first ? tiles - 1 - tile : tile};
  }

  // Sections are of one size. One has at least `section_blocks` blocks: where tiles differ in
  // length, the longest of the last section begins late, and what runs beside it has to last.
  static TileOrder make(int64_t tiles, int64_t heads, int64_t heads_that_share,
                        int64_t bytes_shared, int64_t l2_bytes, bool last_first,
                        int64_t section_blocks) {
    const int64_t fit = std::max<int64_t>(l2_bytes / 2 / std::max<int64_t>(bytes_shared, 1), 1);
    const int64_t enough = section_blocks / std::max<int64_t>(tiles, 1);
    const int64_t wanted = std::max(fit * heads_that_share, enough);
    const int64_t sections = std::max<int64_t>(heads / wanted, 1);
    const int64_t shares = ceil_div(ceil_div(heads, sections), heads_that_share);
    const uint32_t section = static_cast<uint32_t>(std::min(shares * heads_that_share, heads));
    return {static_cast<uint32_t>(tiles),
            static_cast<uint32_t>(heads),
            Divisor(section),
            Divisor(section > 0 ? static_cast<uint32_t>(heads % section) : 0),
            Divisor(section * static_cast<uint32_t>(tiles)),
            last_first};
  }
};

}  // namespace flashbpt
