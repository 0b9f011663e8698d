// What the copying warp of a block does: fills the tiles of Q, K, V and an additive mask.
#pragma once

#include "plan.cuh"

namespace flashbpt::sm90 {

template <size_t kRow>
struct AttnFwdCopies : AttnFwdPlan<kRow> {
  using Plan = AttnFwdPlan<kRow>;
  using Plan::bias_at, Plan::kv_at, Plan::kv_pipe, Plan::q_at, Plan::work_at, Plan::work_pipe;
  using Plan::kBlockK, Plan::kBlockQ, Plan::kMasks, Plan::kTerms, Plan::kWarpgroups, Plan::leads,
      Plan::p, Plan::smem;
  using Plan::Plan;
  using typename Plan::TileBias, typename Plan::TileK, typename Plan::TileQ, typename Plan::TileV;

  __device__ void copy() {
    for (;; work_at.advance()) {
      work_pipe.wait_full(work_at);
      const Work& work = smem.works[work_at.stage()];
      if (!work.any()) break;
      if (work.tiles > 0) copy_work(work);
      if (work.tiles < 2 && leads()) want_next_work();
      if (kMasks) __syncwarp();
      work_pipe.release(work_at);
    }
  }

  // By one thread, once a work, before its last tile: found sooner it would be kept from other
  // blocks.
  __device__ void want_next_work() const {
    ptx::mbarrier_arrive(tile::smem_address(&smem.next_wanted));
  }

  // A row of one head, of a tensor or of all that are alike.
  struct Place {
    int row, head, batch;
  };

  __device__ void copy_work(const Work& work) {
    MaskWindow window;
    const bool masked = kMasks && p.mask_tiles.data != nullptr;
    const auto tile_number = [&](int i, int before) {
      if (!masked) return work.tile<kTerms>(i);
      return window.next(before + 1, work.tile_end, true, [&](int tile) {
        return mask_state<kBlockQ, kBlockK>(p, work.batch, work.head, work.q0, tile);
      });
    };
    const int tiles = work.tiles, len_k = work.keys.len_k;
    const Place keys{work.k_begin, work.kv_head, work.batch};
    const auto copy_k = [&](int tile) {
      const bool looks_at_mask = masked && !window.full(tile);
      copy_keys<TileK>(p.k_map, p.k_steps, keys, tile, tile * kBlockK + looks_at_mask);
    };
    const auto copy_v = [&](int tile) {
      copy_keys<TileV>(p.v_map, p.v_steps, keys, tile, len_k - tile * kBlockK);
    };
    int tile = tile_number(0, work.tile_begin - 1);
    copy_k(tile);
    if (leads()) copy_q(work);
    q_at.advance();
    copy_bias(work, tile);
    for (int i = 1; i < tiles; ++i) {
      if (i == tiles - 1 && leads()) want_next_work();
      const int next = tile_number(i, tile);
      copy_k(next);
      copy_v(tile);
      copy_bias(work, next);
      tile = next;
    }
    copy_v(tile);
  }

  __device__ void copy_q(const Work& work) {
    for (int w = 0; w < kWarpgroups; ++w) {
      this->q_pipe(w).start_filling(q_at, TileQ::kBytes);
      copy_tile<TileQ>(smem.q[q_at.stage()][w], p.q_map, this->q_pipe(w).full(q_at),
                       ptx::CacheHint::kEvictFirst, p.q_steps,
                       {work.q_begin + work.q0 + 64 * w, work.head, work.batch});
    }
  }

  template <typename Tile>
  __device__ void copy_keys(const CUtensorMap& map, const MapSteps& steps, const Place& keys,
                            int tile, int word) {
    if (leads()) {
      kv_pipe.wait_empty(kv_at);
      smem.kv_words[kv_at.stage()] = word;
      ptx::mbarrier_arrive_expecting(kv_pipe.full(kv_at), Tile::kBytes);
      copy_tile<Tile>(smem.kv[kv_at.stage()], map, kv_pipe.full(kv_at), ptx::CacheHint::kEvictLast,
                      steps, {keys.row + tile * kBlockK, keys.head, keys.batch});
    }
    kv_at.advance();
  }

  __device__ void copy_bias(const Work& work, int tile) {
    if (!this->additive()) return;
    if (leads()) {
      for (int w = 0; w < kWarpgroups; ++w) {
        this->bias_pipe(w).start_filling(bias_at, TileBias::kBytes);
        copy_tile<TileBias>(smem.bias[bias_at.stage()][w], p.bias_map,
                            this->bias_pipe(w).full(bias_at), ptx::CacheHint::kEvictFirst,
                            p.bias_steps, {work.q0 + 64 * w, work.head, work.batch},
                            tile * kBlockK);
      }
    }
    bias_at.advance();
  }

  // Chunk by chunk; what lies outside of the tensor becomes zeros.
  template <typename Tile>
  static __device__ void copy_tile(char* to, const CUtensorMap& map, uint32_t full,
                                   ptx::CacheHint hint, const MapSteps& steps, const Place& at,
                                   int first_col = 0) {
#pragma unroll
    for (int c = 0; c < Tile::kChunks; ++c)
      ptx::tma_load_4d(tile::smem_address(to) + c * Tile::kChunkBytes, map, full, hint,
                       first_col + c * Tile::kChunkCols, at.row, at.head * steps.head,
                       at.batch * steps.batch);
  }
};

}  // namespace flashbpt::sm90
