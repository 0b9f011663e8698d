// A ring of buffers in shared memory between those who fill and those who read them.
#pragma once

#include "../ptx/mbarrier.h"
#include "smem_tile.h"

namespace flashbpt::tile {

// Where someone is in the ring, in one register. The parity of the phase flips with every round.
template <int kStages>
class RingPlace {
 public:
  __device__ int stage() const { return kStages == 1 ? 0 : bits_ & 0xff; }
  __device__ uint32_t parity() const { return bits_ >> 8; }
  __device__ void advance() { bits_ = stage() + 1 < kStages ? bits_ + 1 : (parity() ^ 1) << 8; }
  __device__ RingPlace next() const {
    RingPlace place = *this;
    place.advance();
    return place;
  }

 private:
  uint32_t bits_ = 0;
};

template <int kStages>
struct PipelineSmem {
  uint64_t full[kStages];   // an arrival of each thread that fills, and the bytes they expect
  uint64_t empty[kStages];  // an arrival of each warp that reads
};

template <int kStages>
struct Pipeline {
  using Place = RingPlace<kStages>;
  PipelineSmem<kStages>& smem;

  // By one thread; ptx::fence_mbarrier_init and a barrier of all follow.
  __device__ void init(int reading_warps, int filling_threads = 1) const {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(smem_address(&smem.full[s]), filling_threads);
      ptx::mbarrier_init(smem_address(&smem.empty[s]), reading_warps);
    }
  }

  __device__ uint32_t full(const Place& at) const { return smem_address(&smem.full[at.stage()]); }
  __device__ uint32_t empty(const Place& at) const { return smem_address(&smem.empty[at.stage()]); }

  // The one that fills: waits until nobody reads the stage, and may expect so many bytes in it.
  __device__ void wait_empty(const Place& at) const {
    ptx::mbarrier_wait(empty(at), at.parity() ^ 1);
  }
  __device__ void start_filling(const Place& at, int bytes) const {
    wait_empty(at);
    ptx::mbarrier_arrive_expecting(full(at), bytes);
  }
  // Those that read.
  __device__ void wait_full(const Place& at) const { ptx::mbarrier_wait(full(at), at.parity()); }
  __device__ void release(const Place& at) const {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty(at));
  }
};

}  // namespace flashbpt::tile
