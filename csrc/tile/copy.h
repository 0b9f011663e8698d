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

// One chunk of a row of `row_bytes`, asynchronously where its alignment allows; zero past the end.
__device__ inline void copy_chunk(uint32_t dst_smem, const char* row, int c, int row_bytes,
                                  int access) {
  const int left = row_bytes - c * kChunkBytes;
  const int bytes = left < 0 ? 0 : (left > kChunkBytes ? kChunkBytes : left);
  const char* from = row + c * kChunkBytes;
  if (bytes == 0) {
    ptx::store_shared_16(dst_smem, {0, 0, 0, 0});
  } else if (access == 16) {
    ptx::cp_async_16(dst_smem, from, bytes);
  } else if (access >= 4) {
    for (int i = 0; i < kChunkBytes; i += 4) {
      const int word = bytes - i < 0 ? 0 : (bytes - i > 4 ? 4 : bytes - i);
      ptx::cp_async_4(dst_smem + i, word > 0 ? from + i : from, word);
    }
  } else {
    ptx::store_shared_16(dst_smem, gather_chunk<uint8_t>(from, bytes, 1));
  }
}

// Starts copying rows [0, rows) and the first row_bytes of each; what the tile holds beyond becomes
// zero and is not read. All kThreads take part; the caller commits and waits.
template <int kRows, int kThreads, typename Tile>
__device__ void load_tile(Tile dst, GmemRows src, int rows, int row_bytes) {
  constexpr int kRowsAtOnce = kThreads / Tile::kChunks;
  static_assert(kRowsAtOnce > 0 && kRows % kRowsAtOnce == 0);
  const int first_row = threadIdx.x / Tile::kChunks, c = threadIdx.x % Tile::kChunks;
  if (src.access == 16) {
    const int left = row_bytes - c * kChunkBytes;
    const int bytes = left < 0 ? 0 : (left > kChunkBytes ? kChunkBytes : left);
    const char* from = src.data + first_row * src.row_stride + (left > 0 ? c * kChunkBytes : 0);
    if (rows >= kRows) {
#pragma unroll
      for (int r = 0; r < kRows; r += kRowsAtOnce) {
        ptx::cp_async_16(dst.chunk(first_row + r, c), from, bytes);
        from += kRowsAtOnce * src.row_stride;
      }
    } else {
#pragma unroll 1
      for (int r = first_row; r < kRows; r += kRowsAtOnce) {
        // Past the end nothing is read; the address only has to be one.
        ptx::cp_async_16(dst.chunk(r, c), r < rows ? from : src.data, r < rows ? bytes : 0);
        from += kRowsAtOnce * src.row_stride;
      }
    }
  } else {
#pragma unroll 1
    for (int r = first_row; r < kRows; r += kRowsAtOnce)
      copy_chunk(dst.chunk(r, c), src.data + r * src.row_stride, c, r < rows ? row_bytes : 0,
                 src.access);
  }
}

}  // namespace flashbpt::tile
