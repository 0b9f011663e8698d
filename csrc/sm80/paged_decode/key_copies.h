// The keys and values of a share on their way into the warps' rings.
#pragma once

#include "../../tile/copy.h"
#include "../paged_keys.h"
#include "config.h"
#include "launch.h"
#include "segments.h"

namespace flashbpt::sm80 {

// One warp's steps, one after the other: those of the share's segments that are this warp's. It
// runs ahead of the products, over the ends of items too. Where keys lie is looked up by a lane for
// each: of two steps at a time where a step has 16 keys.
template <PagedDecodeConfig kConfig>
class KeyCopies {
 public:
  static constexpr int kBlockK = kConfig.block_k;
  static constexpr int kSteps = 32 / kBlockK;  // that one look-up is for
  using Tile = tile::SmemTile<kConfig.row_bytes()>;

  __device__ KeyCopies(const PagedDecodeParams& p, const PagedShare<kConfig>& share, int kv_head)
      : p_(p), segments_(share.others), kv_head_(kv_head) {
    begin(share.first);
    slot_ = look_up();
  }

  // Starts the copies of the next step, if there is one, and looks up those after if need be.
  __device__ void feed(Tile k, Tile v) {
    constexpr unsigned kAll = 0xffffffffu >> (32 - kBlockK);
    const unsigned there = __ballot_sync(0xffffffffu, slot_.page >= 0) >> source_ & kAll;
    if (p_.whole_chunks && there == kAll) {
      copy_all(k, p_.k, p_.k_chunks, static_cast<int>(p_.dim));
      copy_all(v, p_.v, p_.v_chunks, static_cast<int>(p_.dim_v));
    } else if (__shfl_sync(0xffffffffu, slot_.token, source_) >= 0) {
#pragma unroll 1
      for (int i = 0; i < 2; ++i)
        copy_some(i ? v : k, i ? p_.v : p_.k, static_cast<int>(i ? p_.dim_v : p_.dim),
                  i ? p_.access_v : p_.access_k);
    }
    ptx::cp_async_commit();
    source_ = (source_ + kBlockK) % 32;
    if (source_ == 0) slot_ = look_up();
  }

 private:
  __device__ void begin(const Segment& s) {
    constexpr int kUnitKeys = kConfig.unit_keys();
    key_ = s.begin + static_cast<int>(threadIdx.x / 32) * kBlockK;
    steps_ = max(s.end - key_ + kUnitKeys - 1, 0) / kUnitKeys;
    begin_ = s.request.seen;
    end_ = s.end;
    entries_ = paged_entries(p_.table, s.batch);
  }
  // Of the next steps each lane gets where its key lies. Page -1: nowhere, zeros take its
  // place; token -1: there is no step.
  __device__ PagedSlot look_up() {
    step_ += kSteps;
    while (step_ >= steps_) {
      step_ -= steps_;
      Segment s;
      if (!segments_.next(p_, p_.schedule, s)) {
        step_ = 0, steps_ = INT32_MAX, entries_.data = nullptr;
        break;
      }
      begin(s);
    }
    if (!entries_) return {-1, -1};
    const int key = key_ + step_ * kConfig.unit_keys() + static_cast<int>(threadIdx.x % kBlockK);
    if (key < begin_ || key >= end_) return {-1, 0};
    const uint32_t entry = paged_entry(p_.table, p_.schedule.page_size, key);
    return paged_slot(p_.table, p_.schedule.page_size, entries_.low(entry), key);
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
  __device__ void copy_all(Tile to, const CacheView& cache, PagedChunks strides, int width) const {
    const uint32_t mine = strides.at(slot_);
#pragma unroll
    for (int c = chunk(); c < Tile::kChunks; c += kChunksAtOnce) {
      const char* const from = columns(cache) + c * tile::kChunkBytes;
      const int bytes = chunk_bytes(c, width);
#pragma unroll
      for (int first = 0; first < kBlockK; first += kRowsAtOnce) {
        const uint32_t chunks = __shfl_sync(0xffffffffu, mine, source_ + first + row());
        ptx::cp_async_16(to.chunk(first + row(), c), from + uint64_t{chunks} * tile::kChunkBytes,
                         bytes, policy_);
      }
    }
  }
  // Any rows. Rolled: it is rare, and its instructions would push others out of the cache.
  __device__ void copy_some(Tile to, const CacheView& cache, int width, int access) const {
    const int64_t mine = slot_.page < 0 ? -1
                                        : (slot_.page * cache.page + slot_.token * cache.token) *
                                              int64_t{kConfig.cache_bytes};
#pragma unroll 1
    for (int c = chunk(); c < Tile::kChunks; c += kChunksAtOnce)
#pragma unroll 1
      for (int r = row(); r < kBlockK; r += kRowsAtOnce) {
        const int64_t offset = __shfl_sync(0xffffffffu, mine, source_ + r);
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
  const uint64_t policy_ = ptx::read_once_policy();
  Segments<kConfig> segments_;
  const int kv_head_;
  IntegersView entries_;     // of the request; none: the share is at its end
  int key_ = 0;              // the warp's first of the segment
  int begin_ = 0, end_ = 0;  // of the keys that any row of the request sees, and of the segment
  int steps_ = 0;            // of the warp in the segment
  int step_ = static_cast<int>(threadIdx.x % 32 / kBlockK) - kSteps;  // this lane's
  PagedSlot slot_;                                                    // of its key
  int source_ = 0;  // the first lane that has a slot of the next step
};

}  // namespace flashbpt::sm80
