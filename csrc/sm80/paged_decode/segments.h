// The runs of units of which a team's share is made, found on the device.
#pragma once

#include "config.h"
#include "schedule.h"

namespace flashbpt::sm80 {

// Units of a team's share, of which the last team that has any may have fewer. Where all requests
// have n units (else n is 0) it is rounded up, by an eighth at most, so that the ends of shares are
// those of requests, or that a request is so many shares: little is split then, and teams whose
// requests begin with the same pages read them at the same time.
__device__ inline int share_of(const PagedSchedule& s, int units, int n) {
  const int share = static_cast<int>(s.teams.quotient(units + s.teams.value() - 1));
  if (n == 0 || share == 0) return share;
  const int parts = n / share;
  const int whole = parts > 0 ? (n + parts - 1) / parts : (share + n - 1) / n * n;
  return whole <= share + share / 8 ? whole : share;
}

struct PagedRequest {
  int row_begin, rows;  // in query
  int length;           // keys
  int seen;             // first key that the window leaves; those before are not read
  int first;            // key of the first unit
  int key_units;        // of an item
  int tiles;            // of rows: items
  __device__ int units(int extra) const { return tiles * (key_units + extra); }
};

__device__ inline int rows_of(const PagedParams& p, int request) {
  return p.cu_seqlens_q ? p.cu_seqlens_q.low(request + 1) - p.cu_seqlens_q.low(request) : 1;
}

template <PagedDecodeConfig kConfig>
__device__ PagedRequest request_of(const PagedParams& p, const PagedSchedule& s, int b) {
  constexpr int kUnitKeys = kConfig.unit_keys();
  PagedRequest r;
  r.row_begin = p.cu_seqlens_q ? p.cu_seqlens_q.low(b) : b;
  r.rows = rows_of(p, b);
  r.length = paged_length(p.table, b);
  r.seen = static_cast<int>(max(r.length - r.rows - p.band.left, int64_t{0}));
  r.first = r.seen / kUnitKeys * kUnitKeys;
  // Rows without keys are written too.
  r.key_units = max((r.length - r.first + kUnitKeys - 1) / kUnitKeys, 1);
  const int rows = r.rows <= s.most_rows ? r.rows : 0;
  r.tiles = (rows * static_cast<int>(s.group.value()) + kConfig.rows - 1) / kConfig.rows;
  return r;
}

// A run of units of one item.
struct Segment {
  PagedRequest request;
  int batch;  // index of the request
  int row_tile;
  int begin, end;  // keys
  bool first;      // before is 0: a flag takes fewer registers
  int before;      // units of the item that are earlier teams'
  int after;       // and later teams'

  __device__ bool whole() const { return first && after == 0; }
};

// The segments of a share, one after the other.
template <PagedDecodeConfig kConfig>
struct Segments {
  // Where the next one begins: a unit, counted from the first of a request, there or later.
  int batch, unit;
  int left;   // units
  int extra;  // units that an item counts for beside its own

  // False at the end of the share.
  __device__ bool next(const PagedParams& p, const PagedSchedule& s, Segment& segment) {
    PagedRequest& r = segment.request;
    while (left > 0) {
      while (unit >= (r = request_of<kConfig>(p, s, batch)).units(extra)) {
        unit -= r.units(extra);
        ++batch;
      }
      const int item = r.key_units + extra;
      segment.batch = batch;
      segment.row_tile = r.tiles == 1 ? 0 : unit / item;
      const int from = unit - segment.row_tile * item, count = min(left, item - from);
      unit += count;
      left -= count;
      if (from >= r.key_units) continue;  // what an item costs beside its keys
      segment.begin = r.first + from * kConfig.unit_keys();
      segment.end = min(segment.begin + count * kConfig.unit_keys(), r.length);
      segment.first = from == 0;
      segment.before = from;
      segment.after = max(r.key_units - from - count, 0);
      return true;
    }
    return false;
  }
};

// A team's share, in shared memory.
template <PagedDecodeConfig kConfig>
struct PagedShare {
  int each;  // units of a whole share
  bool any;  // of this one
  Segment first;
  Segments<kConfig> others;
  alignas(16) int warp_units[kConfig.warps];  // alone in what one load may take
};

// The whole block calls it. Neighbouring requests are a thread's; their sums, added up over the
// threads, say whose the team's first unit is.
template <PagedDecodeConfig kConfig>
__device__ void find_share(const PagedParams& p, const PagedSchedule& s, int team,
                           PagedShare<kConfig>& share) {
  constexpr int kWarps = kConfig.warps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int batch = static_cast<int>(p.batch), each = (batch + 32 * kWarps - 1) / (32 * kWarps);
  const int first = threadIdx.x * each, last = min(first + each, batch);
  const int same = request_of<kConfig>(p, s, 0).units(0);
  int mine = 0, items = 0;
  bool differ = false;
#pragma unroll 1
  for (int b = first; b < last; ++b) {
    const PagedRequest r = request_of<kConfig>(p, s, b);
    mine += r.units(0);
    items += r.tiles;
    differ |= r.units(0) != same;
  }
  differ = __syncthreads_or(differ);
  const int extra = differ ? item_extra(kConfig.rows) : 0;
  mine += items * extra;
  int upto = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, upto, d);
    if (lane >= d) upto += before;
  }
  if (lane == 31) share.warp_units[warp] = upto;
  __syncthreads();  // the warps' units are there
  int units = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) upto += share.warp_units[w];
    units += share.warp_units[w];
  }
  const int whole = share_of(s, units, differ ? 0 : same), begin = min(team * whole, units);
  if (threadIdx.x == 0) {
    share.each = whole;
    if (begin == units) share.any = false;
  }
  const int unit = begin - (upto - mine);
  if (unit >= 0 && unit < mine) {
    Segments<kConfig> segments{first, unit, min(whole, units - begin), extra};
    share.any = segments.next(p, s, share.first);
    share.others = segments;
  }
  __syncthreads();  // the share is there
}

}  // namespace flashbpt::sm80
