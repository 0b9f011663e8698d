// How the work of a call over paged caches is split: evenly over keys, on the device.
//
// An item is a tile of rows of one request; its keys go in units, a step of each warp. The units of
// all items, one after the other, are cut into equal shares, one a team of blocks, so that a team
// ends one item, does some whole and begins another, whatever the lengths are. A team has a block
// for each kv head: its blocks go over the same keys at the same time, whose heads are neighbours
// in memory. What a team does of an item that others share, it leaves as partial states: parts.h.
#pragma once

#include "../../attention/divisor.h"
#include "../../paged_params.h"

namespace flashbpt::sm80 {

// Of a grid whose teams share items.
constexpr int kMostBlocks = 1280;
constexpr int64_t kMostUnits = int64_t{1} << 30;

// What an item costs beside its keys, in units: Q, and the merge of its warps. Counted where
// requests differ; where they are the same all teams have as many items.
constexpr int item_extra(int tile_rows) {
  return tile_rows / 8;
}

struct PagedSchedule {
  int tile_rows;  // of an item
  int most_rows;  // requests with more rows are another kernel's
  Divisor teams;  // that share the units
  Divisor heads_kv;
  Divisor group;  // query heads of a kv head
  Divisor page_size;

  FLASHBPT_HOST_DEVICE int blocks() const {
    return static_cast<int>(teams.value() * heads_kv.value());
  }
  // Where a block leaves what it did of an item that its team did not do alone: the item that the
  // team ended, or the one that it began. Rows of output, and LSEs, of which those of an item's
  // parts are neighbours.
  FLASHBPT_HOST_DEVICE int partial_row(int team, int kv_head, bool began, int row) const {
    const int block = team * static_cast<int>(heads_kv.value()) + kv_head;
    return (2 * block + began) * tile_rows + row;
  }
  FLASHBPT_HOST_DEVICE int partial_lse(int team, int kv_head, bool began, int row) const {
    return ((kv_head * tile_rows + row) * static_cast<int>(teams.value()) + team) * 2 + began;
  }
};

// Row r of an item: its token among the request's, and its query head.
struct PagedRow {
  int token, head;
};
FLASHBPT_HOST_DEVICE inline PagedRow row_of(const PagedSchedule& s, int row_tile, int kv_head,
                                            int r) {
  const int index = row_tile * s.tile_rows + r;
  const int group = static_cast<int>(s.group.value());
  return {static_cast<int>(s.group.quotient(index)),
          kv_head * group + static_cast<int>(s.group.remainder(index))};
}

}  // namespace flashbpt::sm80
