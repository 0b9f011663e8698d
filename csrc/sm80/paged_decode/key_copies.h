// The keys and values of a share on their way into the warps' rings.
#pragma once

#include "../../tile/copy.h"
#include "../paged_keys.h"
#include "config.h"
#include "launch.h"
#include "segments.h"

namespace flashbpt::sm80 {

// One warp's steps, one after the other: those of the share's segments that are this warp's. It
// runs ahead of the products, over the ends of items too.
template <PagedDecodeConfig kConfig>
class KeyCopies {
 public:
  static constexpr int kBlockK = PagedDecodeConfig::kBlockK;
  using Tile = tile::SmemTile<kConfig.row_bytes()>;

  __device__ KeyCopies(const PagedDecodeParams& p, const Segments& share, int kv_head)
      : p_(p), share_(share), kv_head_(kv_head) {
    slot_ = look_up();
  }

  // Starts the copies of the next step, if there is one, and looks up the one after.
  __device__ void feed(Tile k, Tile v) {
    const PagedSlot slot = slot_;
    slot_ = look_up();
    const bool there = slot.page >= 0;
    if (p_.whole_chunks && __all_sync(0xffffffffu, there || threadIdx.x % 32 >= kBlockK)) {
      copy_all(k, p_.k, p_.k_chunks, slot, static_cast<int>(p_.dim));
      copy_all(v, p_.v, p_.v_chunks, slot, static_cast<int>(p_.dim_v));
    } else if (slot.token >= 0) {
#pragma unroll 1
      for (int i = 0; i < 2; ++i)
        copy_some(i ? v : k, i ? p_.v : p_.k, slot, static_cast<int>(i ? p_.dim_v : p_.dim),
                  i ? p_.access_v : p_.access_k);
    }
    ptx::cp_async_commit();
  }

 private:
  // Of the next step lanes 0 to 15 get where their key lies. Page -1: nowhere, zeros take its
  // place; token -1: there is no step.
  __device__ PagedSlot look_up() {
    key_ += kConfig.unit_keys();
    while (key_ >= end_) {
      Segment s;
      if (!share_.next(p_, p_.schedule, s)) {
        key_ = 0, end_ = INT32_MAX, entries_ = -1;
        break;
      }
      key_ = s.begin + static_cast<int>(threadIdx.x / 32) * kBlockK;
      begin_ = s.request.seen;
      end_ = s.end;
      entries_ = p_.table.begin(s.batch);
    }
    if (entries_ < 0) return {-1, -1};
    const int lane = threadIdx.x % 32, key = key_ + lane;
    if (lane >= kBlockK || key < begin_ || key >= end_) return {-1, 0};
    return paged_slot(p_.table, p_.schedule.page_size, entries_, key);
  }

  // Of each row this lane has chunk j, j + 32, ...
  static constexpr int kChunksAtOnce = Tile::kChunks < 32 ? Tile::kChunks : 32;
  static constexpr int kRowsAtOnce = 32 / kChunksAtOnce;
  static __device__ int row() { return threadIdx.x % 32 / kChunksAtOnce; }
  static __device__ int chunk() { return threadIdx.x % kChunksAtOnce; }
  // Bytes of a chunk that a row has.
  static __device__ int chunk_bytes(int chunk, int width) {
    const int left = width * kConfig.cache_bytes - chunk * tile::kChunkBytes;
    return left < 0 ? 0 : (left > tile::kChunkBytes ? tile::kChunkBytes : left);
  }
  // The kv head's columns in slot 0.
  __device__ const char* columns(const CacheView& cache) const {
    return static_cast<const char*>(cache.data) +
           kv_head_ * cache.head * int64_t{kConfig.cache_bytes};
  }

  // Rows that are all there, in whole chunks.
  __device__ void copy_all(Tile to, const CacheView& cache, PagedChunks strides, PagedSlot slot,
                           int width) const {
    const uint32_t mine = slot.page * strides.page + slot.token * strides.token;
#pragma unroll
    for (int c = chunk(); c < Tile::kChunks; c += kChunksAtOnce) {
      const char* const from = columns(cache) + c * tile::kChunkBytes;
      const int bytes = chunk_bytes(c, width);
#pragma unroll
      for (int first = 0; first < kBlockK; first += kRowsAtOnce) {
        const uint32_t chunks = __shfl_sync(0xffffffffu, mine, first + row());
        ptx::cp_async_16(to.chunk(first + row(), c), from + uint64_t{chunks} * tile::kChunkBytes,
                         bytes);
      }
    }
  }
  // Any rows. Rolled: it is rare, and its instructions would push others out of the cache.
  __device__ void copy_some(Tile to, const CacheView& cache, PagedSlot slot, int width,
                            int access) const {
    const int64_t mine = slot.page < 0 ? -1
                                       : (slot.page * cache.page + slot.token * cache.token) *
                                             int64_t{kConfig.cache_bytes};
#pragma unroll 1
    for (int c = chunk(); c < Tile::kChunks; c += kChunksAtOnce)
#pragma unroll 1
      for (int r = row(); r < kBlockK; r += kRowsAtOnce) {
        const int64_t offset = __shfl_sync(0xffffffffu, mine, r);
        const int bytes = offset < 0 ? 0 : chunk_bytes(c, width);
        const char* const from = bytes ? columns(cache) + c * tile::kChunkBytes + offset
                                       : static_cast<const char*>(cache.data);
        if (access == tile::kChunkBytes)
          ptx::cp_async_16(to.chunk(r, c), from, bytes);
        else
          tile::copy_chunk(to.chunk(r, c), from, bytes, access);
      }
  }

  const PagedDecodeParams& p_;
  Segments share_;
  const int kv_head_;
  int64_t entries_ = 0;      // of the request, in the page table; -1: the share is at its end
  int key_ = 0;              // of the step
  int begin_ = 0, end_ = 0;  // of the keys that any row of the request sees, and of the segment
  PagedSlot slot_;
};

}  // namespace flashbpt::sm80
