// The runs of units of which a team's share is made, found on the device.
#pragma once

#include "schedule.h"

namespace flashbpt::sm80 {

struct PagedUnit {
  int request;
  int64_t unit;  // within the request
};

// What a block finds out about its team's share.
struct PagedShareSmem {
  static constexpr int kMostWarps = 8;
  int64_t warp_units[kMostWarps];
  PagedUnit start;
};
struct PagedShare {
  int64_t units;       // of all requests
  int64_t begin, end;  // the team's
  PagedUnit start;
};

// The whole block of kWarps warps calls it. Neighbouring requests are a thread's; their sums, added
// up over the threads, say whose the team's first unit is.
template <int kWarps>
__device__ PagedShare find_share(const PagedParams& p, const PagedSchedule& s, int team,
                                 PagedShareSmem& smem) {
  static_assert(kWarps <= PagedShareSmem::kMostWarps);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int batch = static_cast<int>(p.batch), each = (batch + 32 * kWarps - 1) / (32 * kWarps);
  const int first = threadIdx.x * each;
  int64_t mine = 0;
  for (int b = first; b < min(first + each, batch); ++b) mine += request_of(p, s, b).units();
  int64_t upto = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int64_t before = __shfl_up_sync(0xffffffffu, upto, d);
    if (lane >= d) upto += before;
  }
  if (lane == 31) smem.warp_units[warp] = upto;
  __syncthreads();  // the warps' units are there
  PagedShare share{};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) upto += smem.warp_units[w];
    share.units += smem.warp_units[w];
  }
  share.begin = s.share_begin(team, share.units);
  share.end = s.share_begin(team + 1, share.units);
  int64_t unit = share.begin - (upto - mine);
  if (unit >= 0 && unit < mine) {
    int b = first;
    for (int64_t units; unit >= (units = request_of(p, s, b).units()); ++b) unit -= units;
    smem.start = {b, unit};
  }
  __syncthreads();  // the start is there
  share.start = smem.start;
  return share;
}

// A run of units of one item.
struct Segment {
  PagedRequest request;
  int batch;  // index of the request
  int row_tile;
  int begin, end;  // keys
  bool first;      // it begins with the item's first unit
  int after;       // units of the item that are left to the next teams

  __device__ bool whole() const { return first && after == 0; }
};

// The segments of a share, one after the other.
class Segments {
 public:
  __device__ Segments(PagedUnit start, int64_t units) : next_(start), left_(units) {}

  // False at the end of the share.
  __device__ bool next(const PagedParams& p, const PagedSchedule& s, Segment& segment) {
    if (left_ == 0) return false;
    segment.request = request_of(p, s, next_.request);
    while (next_.unit >= segment.request.units()) {
      next_ = {next_.request + 1, 0};
      segment.request = request_of(p, s, next_.request);
    }
    const PagedRequest& r = segment.request;
    segment.batch = next_.request;
    segment.row_tile = r.tiles == 1 ? 0 : static_cast<int>(next_.unit / r.key_units);
    const int from = static_cast<int>(next_.unit - int64_t{segment.row_tile} * r.key_units);
    const int count = static_cast<int>(min(left_, int64_t{r.key_units - from}));
    segment.begin = r.first + from * s.unit_keys;
    segment.end = min(segment.begin + count * s.unit_keys, r.length);
    segment.first = from == 0;
    segment.after = r.key_units - from - count;
    next_.unit += count;
    left_ -= count;
    return true;
  }

 private:
  PagedUnit next_;
  int64_t left_;
};

}  // namespace flashbpt::sm80
