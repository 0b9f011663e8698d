// The numbers of the kernel that merges the parts of paged_decode.
#pragma once

#include "../paged_decode/schedule.h"

namespace flashbpt::sm80 {

// The parts are few kilobytes a row, in the L2 cache: latency binds. The grid is one wave; a warp
// has four columns a lane of four parts at a time, and several such loads under way.
struct PagedMergeConfig {
  int warps;
  int unroll;      // loads of a lane under way
  int min_blocks;  // that a multiprocessor holds at least
  static constexpr int kColumns = 32;
  static constexpr int kLanes = kColumns / 4, kParts = 32 / kLanes;  // of a part; at a time
  constexpr int threads() const { return 32 * warps; }
  constexpr int parts_of_warp() const { return kParts * unroll; }  // up to so many a warp is enough
};
inline constexpr PagedMergeConfig kPagedMergeConfig = {8, 4, 3};

}  // namespace flashbpt::sm80
