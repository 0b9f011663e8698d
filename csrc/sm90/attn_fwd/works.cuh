// What the finding warp of a block does: takes works from the counter of all blocks, and says what
// they are. It finds one when the copying warp wants it, so that other blocks may have it.
#pragma once

#include "../../ptx/prefetch.h"
#include "plan.cuh"

namespace flashbpt::sm90 {

template <size_t kRow>
struct AttnFwdWorks : AttnFwdPlan<kRow> {
  using Plan = AttnFwdPlan<kRow>;
  using Plan::kBlockK, Plan::kBlockQ, Plan::kThreads, Plan::leads, Plan::p, Plan::smem;
  using Plan::Plan;
  using Plan::work_at, Plan::work_pipe;

  __device__ void find() {
    bool found = find_next(work_at, true);
    for (uint32_t parity = 0; found; parity ^= 1) {
      ptx::mbarrier_wait(tile::smem_address(&smem.next_wanted), parity);
      work_at.advance();
      found = find_next(work_at, false);
    }
  }

  // False where there is none: once a block.
  __device__ bool find_next(const tile::RingPlace<Plan::kWorks>& at, bool first) const {
    Work& work = smem.works[at.stage()];
    work_pipe.wait_empty(at);
    uint32_t index = blockIdx.x;
    if (!first) {
      if (leads()) index = gridDim.x + atomicAdd(p.counters, 1);
      if (kThreads > 1) index = __shfl_sync(~0u, index, 0);
    }
    const bool found = index < static_cast<uint32_t>(p.order.count());
    if (found) {
      find_work<kBlockQ, kBlockK, Plan::kExtras>(p, index, smem.sequence, work, leads());
    } else if (leads()) {
      work.batch = -1;
      restore_counters();
    }
    if (leads()) ptx::mbarrier_arrive(work_pipe.full(at));
    if (Plan::kPages && found && work.tiles > 0) prefetch_entries(work);
    return found;
  }

  // The page table's entries of the first tile, to L1: nothing hides the time they take.
  __device__ void prefetch_entries(const Work& work) const {
    const IntegersView entries = paged_entries(p.pages.table, work.batch);
    const int begin = work.tile_begin * kBlockK;
    const int end = min(begin + kBlockK, work.keys.len_k);
    // Keys whose entries fill a line.
    const int line =
        p.pages.table.slots ? 32 : 32 * min(static_cast<int>(p.pages.page_size.value()), kBlockK);
    for (int key = max(begin, work.keys.begin(work.q0)); key < end; key += line)
      ptx::prefetch_l1(static_cast<const char*>(entries.data) +
                       paged_entry(p.pages.table, p.pages.page_size, key) * entries.stride);
  }

  // The last block to end leaves the counters as it found them.
  __device__ void restore_counters() const {
    __threadfence();
    if (atomicAdd(p.counters + 1, 1) == static_cast<int>(gridDim.x) - 1)
      p.counters[0] = p.counters[1] = 0;
  }
};

}  // namespace flashbpt::sm90
