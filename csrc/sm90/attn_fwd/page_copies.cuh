// What the copying warpgroup does where keys lie in pages: up to four warps share each tile.
//
// Pages of whole groups of eight keys are copied by the copy engine, a box of a page at a time; it
// wants about a hundred cycles of a warp to be told of one. Of other pages, and of token tables,
// the threads gather rows. Where all four warps copy, the last one finds works besides.
#pragma once

#include "../../ptx/cp_async.h"
#include "copies.cuh"
#include "works.cuh"

namespace flashbpt::sm90 {

template <size_t kRow>
struct AttnFwdPageCopies : AttnFwdCopies<kRow> {
  using Copies = AttnFwdCopies<kRow>;
  using Copies::Copies;
  using Copies::kBlockK, Copies::kBlockQ, Copies::kTerms, Copies::kv_at, Copies::kv_pipe;
  using Copies::p, Copies::smem, Copies::work_at, Copies::work_pipe;
  using typename Copies::TileK, typename Copies::TileV;

  __device__ void copy() {
    if (p.pages.box_keys == 0)
      copy_works<false, true>();
    else if (p.pages.warps == 4)
      copy_works<true, true>();
    else
      copy_works<true, false>();
  }

  template <bool kBoxes, bool kAllCopy>
  __device__ void copy_works() {
    const AttnFwdWorks<kRow> works(p, smem);
    if (kAllCopy && threadIdx.x == 96) works.find_next(work_at, true);
    __syncwarp();
    for (;; work_at.advance()) {
      work_pipe.wait_full(work_at);
      const Work& work = smem.works[work_at.stage()];
      if (!work.any()) break;
      if (work.tiles > 0) copy_work<kBoxes, kAllCopy>(work);
      if (kAllCopy && threadIdx.x == 96) works.find_next(work_at.next(), false);
      if (!kAllCopy && work.tiles < 2 && threadIdx.x == 0) this->want_next_work();
      __syncwarp();
      work_pipe.release(work_at);
    }
    if (!kBoxes) {  // copies end before their thread does
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
    }
  }

  // Entries of the page table are read a tile ahead, so that nobody waits for them.
  template <bool kBoxes, bool kAllCopy>
  __device__ void copy_work(const Work& work) {
    const Request<kBoxes> request(p.pages, work);
    const int tiles = work.tiles;
    PagedSlot slot = request.slot(request.entry(work.tile<kTerms>(0)));
    Entry ahead = request.entry(work.tile<kTerms>(min(1, tiles - 1)));
    copy_keys<kBoxes>(work, slot);
    if (threadIdx.x == 0) this->copy_q(work);
    this->q_at.advance();
    for (int i = 1; i < tiles; ++i) {
      if (!kAllCopy && i == tiles - 1 && threadIdx.x == 0) this->want_next_work();
      const PagedSlot values = slot;
      slot = request.slot(ahead);
      ahead = request.entry(work.tile<kTerms>(min(i + 1, tiles - 1)));
      copy_keys<kBoxes>(work, slot);
      copy_values<kBoxes>(work, i - 1, values);
    }
    copy_values<kBoxes>(work, tiles - 1, slot);
  }

  template <bool kBoxes>
  __device__ void copy_keys(const Work& work, const PagedSlot& slot) {
    if constexpr (kBoxes)
      copy_boxes<TileK>(p.k_map, p.k_steps, work, kBlockK, slot);
    else
      gather<TileK>(p.k, p.pages.k_chunks, p.dim, work, slot);
  }
  template <bool kBoxes>
  __device__ void copy_values(const Work& work, int i, const PagedSlot& slot) {
    if constexpr (kBoxes)
      copy_boxes<TileV>(p.v_map, p.v_steps, work, work.keys.len_k - work.tile<kTerms>(i) * kBlockK,
                        slot);
    else
      gather<TileV>(p.v, p.pages.v_chunks, p.dim_v, work, slot);
  }

  // --------------------------------------------------------------------- where a lane's keys lie

  // Of the page table; kNone where no row sees the keys.
  struct Entry {
    static constexpr uint32_t kNone = ~0u;
    uint32_t entry;
    int token;  // of the first key, in its page
  };

  // The keys of a request that a row of the work sees. Of a tile a lane has a box, or a row.
  template <bool kBoxes>
  class Request {
   public:
    __device__ Request(const PageCopies& pages, const Work& work)
        : pages_(pages),
          entries_(paged_entries(pages.table, work.batch)),
          begin_(work.keys.begin(work.q0)),
          end_(work.keys.end(min(work.q0 + kBlockQ, work.len_q) - 1)) {}

    // Entries of keys that no row sees are not read: they may be stale.
    __device__ Entry entry(int tile) const {
      const int row = kBoxes ? first_row_of_box(pages_) : row_to_look_up();
      const int key = tile * kBlockK + row, keys = kBoxes ? pages_.box_keys : 1;
      const uint32_t page = pages_.page_size.quotient(key);
      const int token = key - page * pages_.page_size.value();
      if (row >= kBlockK || key + keys <= begin_ || key >= end_) return {Entry::kNone, token};
      const bool slots = !kBoxes && pages_.table.slots;
      return {static_cast<uint32_t>(entries_.low(slots ? key : page)), token};
    }
    __device__ PagedSlot slot(const Entry& at) const {
      if (at.entry == Entry::kNone) return {-1, 0};
      if (kBoxes || !pages_.table.slots) return {static_cast<int>(at.entry), at.token};
      return {static_cast<int>(pages_.page_size.quotient(at.entry)),
              static_cast<int>(pages_.page_size.remainder(at.entry))};
    }

   private:
    const PageCopies& pages_;
    const IntegersView entries_;
    const int begin_, end_;
  };

  // ------------------------------------------------------------------------------ the next stage

  static __device__ int first_row_of_box(const PageCopies& pages) {
    return (threadIdx.x % 32 * pages.warps + threadIdx.x / 32) * pages.box_keys;
  }

  // rows: of the tile, from the first one to the last that there is.
  template <typename Tile>
  __device__ void copy_boxes(const CUtensorMap& map, const MapSteps& steps, const Work& work,
                             int rows, const PagedSlot& slot) {
    const int row = first_row_of_box(p.pages), box_bytes = p.pages.box_keys * Tile::kRowBytes;
    const bool has_box = row < kBlockK;
    kv_pipe.wait_empty(kv_at);
    const uint32_t boxes = __ballot_sync(~0u, has_box);
    if (threadIdx.x == 0) smem.kv_words[kv_at.stage()] = rows;
    if (threadIdx.x % 32 == 0)
      ptx::mbarrier_arrive_expecting(kv_pipe.full(kv_at),
                                     __popc(boxes) * box_bytes * Tile::kChunks);
    __syncwarp();
    // What lies outside of a page becomes zeros.
    if (has_box)
      this->template copy_tile<Tile>(
          smem.kv[kv_at.stage()] + row * Tile::kRowBytes, map, kv_pipe.full(kv_at),
          ptx::CacheHint::kEvictLast, steps,
          {slot.page < 0 ? -p.pages.box_keys : slot.token, work.kv_head, max(slot.page, 0)});
    kv_at.advance();
  }

  // Eight threads copy a row's chunk, 16 bytes each. A warp has kWarpRows neighbouring rows of each
  // kRows, and of all those a lane looks up one.
  static constexpr int kWarpRows = 4, kRows = 4 * kWarpRows;
  static_assert(kBlockK % (2 * kRows) == 0 && kBlockK / kRows * kWarpRows <= 32);

  static __device__ int row_to_look_up() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return lane / kWarpRows * kRows + warp * kWarpRows + lane % kWarpRows;
  }

  template <typename Tile>
  __device__ void gather(const TensorView& cache, const PagedChunks& chunks, int64_t dim,
                         const Work& work, const PagedSlot& slot) {
    constexpr uint32_t kNone = ~0u;
    const int piece = threadIdx.x % 8, first_row = threadIdx.x / 8;
    // In units of 16 bytes, from the first slot.
    const uint32_t mine = slot.page < 0 ? kNone : chunks.at(slot);
    const char* const from =
        static_cast<const char*>(cache.data) + 2 * cache.head * work.kv_head + 16 * piece;
    const uint32_t to = tile::smem_address(smem.kv[kv_at.stage()]) + first_row * Tile::kRowBytes +
                        (piece ^ first_row % 8) * 16;
    kv_pipe.wait_empty(kv_at);
    constexpr int kAtOnce = kBlockK % (4 * kRows) == 0 ? 4 : 2;
#pragma unroll
    for (int i = 0; i < kBlockK / kRows; i += kAtOnce) {
      const char* rows[kAtOnce];
      bool seen[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const uint32_t at = __shfl_sync(~0u, mine, (i + j) * kWarpRows + first_row % kWarpRows);
        seen[j] = at != kNone;
        rows[j] = from + (seen[j] ? uint64_t{at} * 16 : 0);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int c = 0; c < Tile::kChunks; ++c)
          ptx::cp_async_16(
              to + c * Tile::kChunkBytes + (i + j) * kRows * Tile::kRowBytes,
              rows[j] + c * Tile::kRowBytes,
              seen[j] && c * Tile::kChunkCols + 8 * piece < static_cast<int>(dim) ? 16 : 0);
    }
    ptx::mbarrier_arrive_after_copies(kv_pipe.full(kv_at));
    kv_at.advance();
  }
};

}  // namespace flashbpt::sm90
