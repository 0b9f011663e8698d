// Where the keys of a tile lie, looked up while the tile before is multiplied.
#pragma once

#include "../ptx/cp_async.h"
#include "../ptx/shared.h"
#include "../tile/copy.h"
#include "paged_keys.h"

namespace flashbpt::sm80 {

template <int kBlockK>
struct PagedTileSmem {
  IntegersView entries;  // of the request
  int first, end;        // keys that a row of the block sees
  uint32_t fetched[kBlockK];
  // Of two tiles: where all is in whole chunks the offsets of K and of V, else the slots.
  union alignas(16) {
    uint32_t offsets[2][2][kBlockK];  // a copying thread's rows side by side
    PagedSlot slots[2][kBlockK];
  };
};

// Each thread has one key of a tile at most: fetch() starts to copy its entry of the page table,
// and a wait for copies later put() leaves what follows from it to all. So nobody waits for it.
template <int kBlockK, int kThreads, typename Tile>
class PagedTile {
 public:
  static_assert(kBlockK <= kThreads);
  using Smem = PagedTileSmem<kBlockK>;
  using Share = tile::CopyShare<kBlockK, kThreads, Tile>;

  __device__ PagedTile(const PagedKeys& pages, Smem& smem) : pages_(pages), smem_(smem) {}

  __device__ void fetch(int tile) const {
    const int key = tile * kBlockK + row();
    if (!has(key)) return;
    const char* const from = static_cast<const char*>(smem_.entries.data);
    ptx::cp_async_4(tile::smem_address(&smem_.fetched[row()]),
                    from + paged_entry(pages_.table, pages_.page_size, key) * smem_.entries.stride,
                    4);
  }
  __device__ void put(int tile) const {
    if (!has_row()) return;
    const int key = tile * kBlockK + row();
    const bool there = has(key);
    PagedSlot slot{-1, 0};
    if (there) slot = paged_slot(pages_.table, pages_.page_size, smem_.fetched[row()], key);
    if (pages_.whole_chunks) {
      const int at = row() % Share::kRowsAtOnce * kRows + row() / Share::kRowsAtOnce;
      smem_.offsets[tile % 2][0][at] = there ? pages_.k_chunks.at(slot) : tile::kNowhere;
      smem_.offsets[tile % 2][1][at] = there ? pages_.v_chunks.at(slot) : tile::kNowhere;
    } else {
      smem_.slots[tile % 2][row()] = slot;
    }
  }

  // Starts copying the keys or the values of a tile. from: slot 0 of the cache; strides in bytes.
  __device__ void load(Tile to, const char* from, bool values, int64_t token_stride, int row_bytes,
                       int access, int tile) const {
    if (pages_.whole_chunks) {
      uint32_t offsets[kRows];
      const uint32_t* const mine = &smem_.offsets[tile % 2][values][Share().row * kRows];
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const uint4 x = *reinterpret_cast<const uint4*>(mine + i);
        offsets[i] = x.x, offsets[i + 1] = x.y, offsets[i + 2] = x.z, offsets[i + 3] = x.w;
      }
      const bool all = tile * kBlockK >= smem_.first && (tile + 1) * kBlockK <= smem_.end;
      return tile::gather_chunks<kBlockK, kThreads>(to, from, offsets, row_bytes, all);
    }
    const int64_t page_stride = values ? pages_.v_page : pages_.k_page;
    tile::gather_tile<kBlockK, kThreads>(
        to,
        [&](int r) {
          const PagedSlot slot = smem_.slots[tile % 2][r];
          return slot.page < 0 ? nullptr
                               : from + slot.page * page_stride + slot.token * token_stride;
        },
        from, row_bytes, access);
  }

 private:
  static constexpr int kRows = kBlockK / Share::kRowsAtOnce;  // that a thread copies
  static_assert(kRows % 4 == 0);

  // The thread's key in a tile; every warp has as many.
  static constexpr int kWarpRows = kBlockK * 32 / kThreads;
  static __device__ int row() { return threadIdx.x / 32 * kWarpRows + threadIdx.x % 32; }
  static __device__ bool has_row() { return threadIdx.x % 32 < kWarpRows; }
  // Other keys' entries are not read.
  __device__ bool has(int key) const { return has_row() && key >= smem_.first && key < smem_.end; }

  const PagedKeys& pages_;
  Smem& smem_;
};

}  // namespace flashbpt::sm80
