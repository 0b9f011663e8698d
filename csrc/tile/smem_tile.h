// A tile in shared memory: rows of kRowBytes, cut into chunks of 16 bytes.
//
// Chunk c of row r lies at chunk c ^ swizzle(r) of the row. Eight neighbouring rows then have their
// chunks c in different banks, and so have eight neighbouring chunks of a row: ldmatrix and 16-byte
// accesses meet no bank conflict in either direction.
#pragma once

#include <cstdint>

namespace flashbpt::tile {

constexpr int kChunkBytes = 16;

// Address of a pointer into shared memory, as PTX takes it.
__device__ inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

template <int kRowBytesArg>
struct SmemTile {
  static constexpr int kRowBytes = kRowBytesArg;
  static constexpr int kChunks = kRowBytes / kChunkBytes;
  static_assert(kRowBytes >= 64 && (kRowBytes & (kRowBytes - 1)) == 0);

  uint32_t base;  // aligned to kRowBytes and to 128

  // Depends on row % 8 alone.
  static __device__ int swizzle(int row) { return kChunks >= 8 ? row & 7 : (row >> 1) & 3; }

  __device__ uint32_t chunk(int row, int c) const {
    return base + row * kRowBytes + ((c ^ swizzle(row)) * kChunkBytes);
  }
  // Address of the byte `byte` of a row; what is read there must not cross a chunk.
  __device__ uint32_t at(int row, int byte) const {
    return chunk(row, byte / kChunkBytes) + byte % kChunkBytes;
  }
  // From the address of chunk c of some row to that of chunk c + 2 pairs, where c < 2: the swizzle
  // exchanges chunks within 128 bytes only, so that four addresses a row serve all pairs, the
  // others by constant offsets.
  static __device__ uint32_t advance(uint32_t address, int pairs) {
    constexpr int kAround = kChunks >= 8 ? 4 : 2;  // pairs that the swizzle exchanges
    return (address ^ (pairs % kAround * 32)) + pairs / kAround * (kAround * 32);
  }
};

}  // namespace flashbpt::tile
