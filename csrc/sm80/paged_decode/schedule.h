// How the work of a call over paged caches is split: evenly over keys, on the device.
//
// An item is a tile of rows of one request; its keys go in units of unit_keys. The units of all
// items, one after the other, are cut into equal shares, one a team of blocks, so that a team ends
// one item, does some whole and begins another, whatever the lengths are. A team has a block for
// each kv head: its blocks go over the same keys at the same time, whose heads are neighbours in
// memory. What a team does of an item that others share, it leaves as partial states, and the team
// that begins the item leaves a PagedSplit; paged_merge joins them.
#pragma once

#include "../../attention/divisor.h"
#include "../../paged_params.h"

namespace flashbpt::sm80 {

constexpr int kMostTeams = 1024;

struct PagedSchedule {
  int unit_keys;  // of a unit
  int tile_rows;  // of an item
  int teams;      // that share the units, at most kMostTeams
  int most_rows;  // requests with more rows are another kernel's
  Divisor heads_kv;
  Divisor group;  // query heads of a kv head
  Divisor page_size;

  FLASHBPT_HOST_DEVICE int blocks() const { return teams * static_cast<int>(heads_kv.value()); }
  // Units of a team's share, of which the last team that has any may have fewer. Rounded up by an
  // eighth at most, to a power of two times a small number: so that where items have such lengths
  // the ends of shares are those of items, and nothing is split.
  FLASHBPT_HOST_DEVICE int64_t share_of(int64_t units) const {
    const int64_t share = (units + teams - 1) / teams;
    int64_t step = 1;
    while (step * 16 <= share) step *= 2;
    return (share + step - 1) / step * step;
  }
  // Where a team's share begins.
  FLASHBPT_HOST_DEVICE int64_t share_begin(int team, int64_t units) const {
    const int64_t begin = team * share_of(units);
    return begin < units ? begin : units;
  }
  // Where a block leaves what it did of an item that its team did not do alone: the item that the
  // team ended, or the one that it began.
  FLASHBPT_HOST_DEVICE int partial_slot(int team, int kv_head, bool began) const {
    return 2 * (team * static_cast<int>(heads_kv.value()) + kv_head) + began;
  }
};

struct PagedRequest {
  int row_begin, rows;  // in query
  int length;           // keys
  int seen;             // first key that the window leaves; those before are not read
  int first;            // key of the first unit
  int key_units;        // of an item
  int tiles;            // of rows: items
  FLASHBPT_HOST_DEVICE int64_t units() const { return int64_t{tiles} * key_units; }
};

FLASHBPT_HOST_DEVICE inline PagedRequest request_of(const PagedParams& p, const PagedSchedule& s,
                                                    int64_t b) {
  PagedRequest r;
  const int64_t begin = p.row_begin(b);
  r.row_begin = static_cast<int>(begin);
  r.rows = p.cu_seqlens_q ? static_cast<int>(p.cu_seqlens_q[b + 1] - begin) : 1;
  r.length = static_cast<int>(p.table.length(b));
  const int64_t seen = r.length - r.rows - p.band.left;
  r.seen = seen > 0 ? static_cast<int>(seen) : 0;
  r.first = r.seen / s.unit_keys * s.unit_keys;
  const int units = (r.length - r.first + s.unit_keys - 1) / s.unit_keys;
  r.key_units = units > 1 ? units : 1;  // rows without keys are written too
  const int rows = r.rows <= s.most_rows ? r.rows : 0;
  r.tiles = (rows * static_cast<int>(s.group.value()) + s.tile_rows - 1) / s.tile_rows;
  return r;
}

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

// An item that several teams share, as the one that begins it leaves it.
struct alignas(16) PagedSplit {
  int parts;  // teams; 0: none begins here
  int row_begin;
  int row_tile;
  int rows;  // of the item, at most tile_rows
};

}  // namespace flashbpt::sm80
