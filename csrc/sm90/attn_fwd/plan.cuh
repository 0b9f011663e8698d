// What the threads of a block share: shared memory and its barriers.
#pragma once

#include "../../ptx/tma.h"
#include "../../tile/pipeline.h"
#include "../../tile/wgmma_operand.h"
#include "config.h"
#include "schedule.h"

namespace flashbpt::sm90 {

template <size_t kRow>
struct AttnFwdPlan {
  static constexpr AttnFwdConfig kConfig = kAttnFwdKernels[kRow].config;
  static constexpr Extras kExtras = kAttnFwdKernels[kRow].extras;
  static constexpr bool kTerms = has_terms(kExtras);
  static constexpr bool kMasks = has_masks(kExtras), kDropout = kExtras == Extras::kAll;
  static constexpr bool kPages = kExtras == Extras::kPages;
  using T = typename tile::ElementOf<kAttnFwdKernels[kRow].dtype>::Type;

  static constexpr int kBlockQ = kConfig.block_q(), kBlockK = kConfig.block_k;
  static constexpr int kWarpgroups = kConfig.warpgroups;
  static constexpr int kWorks = 4;  // known at a time: one ends, one runs, one is copied, one found
  static constexpr int kQStages = kConfig.q_stages, kStages = kConfig.stages;

  using TileQ = tile::SwizzledTile<64, kConfig.head_dim>;  // of a warpgroup
  using TileK = tile::SwizzledTile<kBlockK, kConfig.head_dim>;
  using TileV = tile::SwizzledTile<kBlockK, kConfig.dim_v>;
  static constexpr int kStageBytes = kConfig.stage_bytes();
  using TileBias = tile::SwizzledTile<64, kBlockK>;                     // of a warpgroup
  static constexpr int kBiasStages = kMasks ? kConfig.bias_stages : 1;  // without masks not used

  // Threads of the finding and of the copying warp that work: with masks all, since they look at
  // them together.
  static constexpr int kThreads = kMasks ? 32 : 1;
  static __device__ bool leads() { return kThreads == 1 || threadIdx.x % 32 == 0; }

  enum NamedBarrier { kTurn = 1, kCleared = kTurn + kWarpgroups };

  struct SmemPlan {
    alignas(1024) char q[kQStages][kWarpgroups][TileQ::kBytes];
    char kv[kStages][kStageBytes];  // K_0, then K_i and V_i-1 in turns, V_last
    char bias[kConfig.bias_stages][kWarpgroups][TileBias::kBytes];
    tile::PipelineSmem<kQStages> q_pipes[kWarpgroups];
    tile::PipelineSmem<kBiasStages> bias_pipes[kMasks ? kWarpgroups : 0];
    tile::PipelineSmem<kStages> kv_pipe;
    tile::PipelineSmem<kWorks> work_pipe;
    uint64_t next_wanted;  // the copying thread, once a work; not where it finds them itself
    int sequence;          // that was found last, of a packed call
    Work works[kWorks];
    // Of the tile of K in a stage, with masks: its first key, + 1 where they have to be looked at.
    // Of a tile of V that the copy engine brings: the keys from its first one on.
    int kv_words[kStages];
  };
  static_assert(sizeof(SmemPlan) <= kConfig.smem_bytes());

  const AttnFwdKernelParams& p;
  SmemPlan& smem;
  const tile::Pipeline<kStages> kv_pipe{smem.kv_pipe};
  const tile::Pipeline<kWorks> work_pipe{smem.work_pipe};
  tile::RingPlace<kQStages> q_at;
  tile::RingPlace<kStages> kv_at;
  tile::RingPlace<kBiasStages> bias_at;
  tile::RingPlace<kWorks> work_at;

  __device__ AttnFwdPlan(const AttnFwdKernelParams& p, SmemPlan& smem) : p(p), smem(smem) {}

  __device__ tile::Pipeline<kQStages> q_pipe(int warpgroup) const {
    return {smem.q_pipes[warpgroup]};
  }

  __device__ tile::Pipeline<kBiasStages> bias_pipe(int warpgroup) const {
    return {smem.bias_pipes[warpgroup]};
  }

  __device__ bool additive() const { return kMasks && p.mask && !p.boolean_mask(); }

  // By one thread, before anybody waits.
  __device__ void init() const {
    constexpr int kMathWarps = 4 * kWarpgroups;
    for (int w = 0; w < kWarpgroups; ++w) {
      q_pipe(w).init(4);
      if (kMasks) bias_pipe(w).init(4);
    }
    kv_pipe.init(kMathWarps, kPages ? p.pages.arrivals() : 1);
    work_pipe.init(kMathWarps + (kPages ? p.pages.warps : 1));
    ptx::mbarrier_init(tile::smem_address(&smem.next_wanted), 1);
    smem.sequence = 0;
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(p.q_map);
    ptx::prefetch_tensor_map(p.k_map);
    ptx::prefetch_tensor_map(p.v_map);
    if (additive()) ptx::prefetch_tensor_map(p.bias_map);
  }
};

}  // namespace flashbpt::sm90
