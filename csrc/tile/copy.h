// Tiles between global and shared memory.
#pragma once

#include "../ptx/cp_async.h"
#include "../ptx/shared.h"
#include "smem_tile.h"

namespace flashbpt::tile {

// Rows of a matrix in global memory, in bytes.
struct GmemRows {
  const char* data;  // row 0, column 0
  int64_t row_stride;
  int access;  // every row starts at a multiple of so many bytes: 16, 8, 4, 2 or 1
};

// The first `bytes` of a chunk, by loads of single elements: rows that asynchronous copies cannot
// read. stride: bytes from one element to the next.
template <typename Element>
__device__ uint4 gather_chunk(const char* src, int bytes, int64_t stride) {
  constexpr int kBytes = sizeof(Element);
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kChunkBytes; i += kBytes)
    if (i < bytes) {
      const Element x = *reinterpret_cast<const Element*>(src + i / kBytes * stride);
      words[i / 4] |= uint32_t{x} << (i % 4 * 8);
    }
  return {words[0], words[1], words[2], words[3]};
}

// The first `bytes` of a chunk, in words, asynchronously where whole words are aligned; zero behind
// them. Rolled: it is rare, and its instructions would push others out of the cache.
__device__ inline void copy_chunk(uint32_t dst_smem, const char* from, int bytes, int access) {
#pragma unroll 1
  for (int i = 0; i < kChunkBytes; i += 4) {
    const int left = bytes - i < 0 ? 0 : (bytes - i > 4 ? 4 : bytes - i);
    if (access >= 4 && left % 4 == 0) {
      ptx::cp_async_4(dst_smem + i, left > 0 ? from + i : from, left);
    } else {
      uint32_t word = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (j < left) word |= uint32_t{reinterpret_cast<const uint8_t*>(from)[i + j]} << (8 * j);
      ptx::store_shared(dst_smem + i, word);
    }
  }
}

// Which chunks of a tile one of kThreads threads copies: chunk `chunk` of the rows row,
// row + kRowsAtOnce, ...
template <int kRows, int kThreads, typename Tile>
struct CopyShare {
  static constexpr int kRowsAtOnce =
      kThreads / Tile::kChunks < kRows ? kThreads / Tile::kChunks : kRows;
  static constexpr bool kAll = kRowsAtOnce * Tile::kChunks == kThreads;  // no thread is left over
  static_assert(kRowsAtOnce > 0 && kRows % kRowsAtOnce == 0);

  const int row = threadIdx.x / Tile::kChunks;
  const int chunk = threadIdx.x % Tile::kChunks;
};

// Starts copying a tile of which all rows and columns are there, in a tensor whose rows all start
// at a multiple of a chunk. first: this thread's first chunk, counted from `data`; row_chunks: from
// one row to the next. 32 bits count the chunks of 64 GB, and take half the registers of a pointer.
template <int kRows, int kThreads, typename Tile>
__device__ void load_whole_tile(Tile dst, const void* data, uint32_t first, uint32_t row_chunks) {
  const CopyShare<kRows, kThreads, Tile> share;
  static_assert(share.kAll);
#pragma unroll
  for (int r = 0; r < kRows; r += share.kRowsAtOnce) {
    ptx::cp_async_16(dst.chunk(share.row + r, share.chunk),
                     static_cast<const char*>(data) + uint64_t{first} * kChunkBytes);
    first += share.kRowsAtOnce * row_chunks;
  }
}

// Starts copying rows [0, rows) and the first row_bytes of each; what the tile holds beyond becomes
// zero and is not read. All kThreads call it; the caller commits and waits.
template <int kRows, int kThreads, typename Tile>
__device__ void load_tile(Tile dst, GmemRows src, int rows, int row_bytes) {
  const CopyShare<kRows, kThreads, Tile> share;
  if (!share.kAll && share.row >= share.kRowsAtOnce) return;
  if (src.access == 16 && rows >= kRows && row_bytes >= Tile::kChunks * kChunkBytes) {
    const char* from = src.data + share.row * src.row_stride + share.chunk * kChunkBytes;
#pragma unroll
    for (int r = 0; r < kRows; r += share.kRowsAtOnce) {
      ptx::cp_async_16(dst.chunk(share.row + r, share.chunk), from);
      from += share.kRowsAtOnce * src.row_stride;
    }
    return;
  }
  const int left = row_bytes - share.chunk * kChunkBytes;
  const int bytes = left < 0 ? 0 : (left > kChunkBytes ? kChunkBytes : left);
#pragma unroll 1
  for (int r = share.row; r < kRows; r += share.kRowsAtOnce) {
    // Past the end nothing is read; the address only has to be one.
    const bool there = r < rows && bytes > 0;
    const char* from = there ? src.data + r * src.row_stride + share.chunk * kChunkBytes : src.data;
    if (src.access == 16 && bytes % kChunkBytes == 0)
      ptx::cp_async_16(dst.chunk(r, share.chunk), from, there ? kChunkBytes : 0);
    else
      copy_chunk(dst.chunk(r, share.chunk), from, there ? bytes : 0, src.access);
  }
}

constexpr uint32_t kNowhere = UINT32_MAX;

// The same for rows of whole chunks that lie anywhere. offsets: of this thread's rows, in chunks
// from `data`, or kNowhere; all: none of the tile's rows is nowhere.
template <int kRows, int kThreads, typename Tile, int kOffsets>
__device__ void gather_chunks(Tile dst, const char* data, const uint32_t (&offsets)[kOffsets],
                              int row_bytes, bool all) {
  const CopyShare<kRows, kThreads, Tile> share;
  static_assert(share.kAll && kOffsets * share.kRowsAtOnce == kRows);
  const char* const from = data + share.chunk * kChunkBytes;
  const bool whole = all && row_bytes >= Tile::kChunks * kChunkBytes;
  if (whole) {
#pragma unroll
    for (int i = 0; i < kOffsets; ++i)
      ptx::cp_async_16(dst.chunk(share.row + i * share.kRowsAtOnce, share.chunk),
                       from + uint64_t{offsets[i]} * kChunkBytes);
    return;
  }
#pragma unroll
  for (int i = 0; i < kOffsets; ++i) {
    const bool there = offsets[i] != kNowhere && share.chunk * kChunkBytes < row_bytes;
    ptx::cp_async_16(dst.chunk(share.row + i * share.kRowsAtOnce, share.chunk),
                     there ? from + uint64_t{offsets[i]} * kChunkBytes : data,
                     there ? kChunkBytes : 0);
  }
}

// The same for any rows: row(r) is where row r begins, null for a row of zeros;
// `somewhere`: any valid address.
template <int kRows, int kThreads, typename Tile, typename Row>
__device__ void gather_tile(Tile dst, Row row, const char* somewhere, int row_bytes, int access) {
  const CopyShare<kRows, kThreads, Tile> share;
  if (!share.kAll && share.row >= share.kRowsAtOnce) return;
  const int left = row_bytes - share.chunk * kChunkBytes;
  const int bytes = left < 0 ? 0 : (left > kChunkBytes ? kChunkBytes : left);
  if (access == kChunkBytes && bytes % kChunkBytes == 0) {
#pragma unroll
    for (int r = share.row; r < kRows; r += share.kRowsAtOnce) {
      const char* const begin = row(r);
      const bool there = begin != nullptr && bytes > 0;
      ptx::cp_async_16(dst.chunk(r, share.chunk),
                       there ? begin + share.chunk * kChunkBytes : somewhere,
                       there ? kChunkBytes : 0);
    }
    return;
  }
#pragma unroll 1
  for (int r = share.row; r < kRows; r += share.kRowsAtOnce) {
    const char* const begin = row(r);
    const bool there = begin != nullptr && bytes > 0;
    copy_chunk(dst.chunk(r, share.chunk), there ? begin + share.chunk * kChunkBytes : somewhere,
               there ? bytes : 0, access);
  }
}

}  // namespace flashbpt::tile
