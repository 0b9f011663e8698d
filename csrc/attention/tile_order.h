// In which order blocks take tiles: longest first, and so that what runs together shares the cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "divisor.h"
#include "host_device.h"

namespace flashbpt {

// Heads go in sections whose keys and values (or queries and their gradients) fit the L2 cache
// together; within a section all heads of one tile come first, and tiles from the longest to the
// shortest. Without sections "longest first" would have every head's keys in use at once. The
// shortest tiles of all heads may come last, after all sections: they fill the time until the last
// section's long ones have ended.
struct TileOrder {
  uint32_t tiles;         // of one head
  uint32_t late;          // the shortest of them, that come last
  uint32_t late_index;    // the first of those of all heads
  Divisor heads;          // of all batch elements
  Divisor section;        // heads of one section
  Divisor last_section;   // and of the last one
  Divisor section_tiles;  // of one section, without the late ones
  bool last_first;        // the last tile of a head is the longest

  struct Place {
    uint32_t head;
    uint32_t tile;
  };

  FLASHBPT_HOST_DEVICE int64_t count() const { return int64_t{tiles} * heads.value(); }

  FLASHBPT_HOST_DEVICE Place at(uint32_t index) const {
    const bool is_late = index >= late_index;
    const uint32_t first_head = is_late ? 0 : section_tiles.quotient(index) * section.value();
    const Divisor& here = is_late                                        ? heads
                          : heads.value() - first_head < section.value() ? last_section
                                                                         : section;
    const uint32_t rest = index - (is_late ? late_index : first_head * (tiles - late));
    const uint32_t rank = here.quotient(rest), tile = is_late ? tiles - late + rank : rank;
    return {first_head + rest - rank * here.value(), last_first ? tiles - 1 - tile : tile};
  }

  // Heads of a section where about `fit` shall be one: as many in each as may be, and whole shares,
  // of which `heads` are a multiple.
  template <typename Int>
  FLASHBPT_HOST_DEVICE static Int section_heads(Int heads, Int fit, Int share) {
    const Int sections = heads < fit ? 1 : heads / fit;
    return (heads / share + sections - 1) / sections * share;
  }

  // Sections are of one size; what they share fits in cache_bytes. late: of the tiles of a head,
  // less than all.
  static TileOrder make(int64_t tiles, int64_t heads, int64_t heads_that_share,
                        int64_t bytes_shared, int64_t cache_bytes, bool last_first, int64_t late) {
    const int64_t fit = std::max<int64_t>(cache_bytes / std::max<int64_t>(bytes_shared, 1), 1);
    const uint32_t section = static_cast<uint32_t>(
        section_heads<int64_t>(heads, fit * heads_that_share, heads_that_share));
    const uint32_t early = static_cast<uint32_t>(tiles - late);
    return {static_cast<uint32_t>(tiles),
            static_cast<uint32_t>(late),
            static_cast<uint32_t>(heads) * early,
            Divisor(heads),
            Divisor(section),
            Divisor(section > 0 ? static_cast<uint32_t>(heads % section) : 0),
            Divisor(int64_t{section} * early),
            last_first};
  }
};

}  // namespace flashbpt
