// Operands of a warpgroup's product that lie in shared memory, and the product over them.
//
// A tile of 16-bit elements is stored as chunks of 64 columns, [chunk][rows][128 bytes]; the 16
// bytes c of a chunk's row r lie at place c ^ (r % 8) (128-byte swizzle), as the copy engine writes
// boxes of 64 columns. Its base is a multiple of 1024 bytes.
//
// A descriptor's low word holds the address and the distance of chunks along the outer dimension,
// both in units of 16 bytes, its high word the distance of 8 rows and the swizzle (PTX
// ISA 9.7.15.5, "matrix descriptor"). The low word of a tile is made once; steps, stages and rows
// add to it.
#pragma once

#include "../ptx/wgmma.h"
#include "element.h"

namespace flashbpt::tile {

template <int kRowsArg, int kColsArg>
struct SwizzledTile {
  static constexpr int kRows = kRowsArg, kCols = kColsArg;
  static constexpr int kChunkCols = 64, kRowBytes = 128;
  static constexpr int kChunks = (kCols + kChunkCols - 1) / kChunkCols;
  static constexpr int kChunkBytes = kRows * kRowBytes;
  static constexpr int kBytes = kChunks * kChunkBytes;
  static_assert(kRows % 8 == 0 && kCols % 16 == 0);
};

// kInner: the inner dimension of the product runs along the tile's columns; kOuter: along its rows.
template <typename Tile, ptx::Major kMajor>
struct SmemOperand {
  static constexpr ptx::Major kAlong = kMajor;
  static constexpr bool kInner = kMajor == ptx::Major::kInner;
  static constexpr int kSteps = (kInner ? Tile::kCols : Tile::kRows) / 16;

  uint32_t low;

  // row: the first of the outer rows, a multiple of 8 (kInner); a whole tile otherwise.
  __device__ explicit SmemOperand(uint32_t address, int row = 0)
      : low((address + row * Tile::kRowBytes) >> 4 |
            static_cast<uint32_t>(kInner ? 16 : Tile::kChunkBytes) >> 4 << 16) {}

  // The tile in stage `stage` of a ring.
  template <int kStageBytes = Tile::kBytes>
  __device__ SmemOperand stage(int stage) const {
    SmemOperand moved = *this;
    moved.low += stage * (kStageBytes >> 4);
    return moved;
  }
  // Of 16 elements of the inner dimension.
  __device__ uint64_t step(int step) const {
    constexpr uint64_t kHigh = (1024u >> 4) | 1u << 30;  // 8 rows; 128-byte swizzle
    const int bytes = kInner ? step / 4 * Tile::kChunkBytes + step % 4 * 32 : step * 2048;
    return kHigh << 32 | (low + (bytes >> 4));
  }
};

// An accumulator as operand a in registers: its columns become the inner dimension.
template <typename T, int kN>
__device__ void pack(const float (&d)[kN][4], uint32_t (&a)[kN / 2][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      a[n / 2][n % 2 * 2 + half] = Element<T>::pack(d[n][2 * half], d[n][2 * half + 1]);
}

// Starts d += a b, or d = a b with kOverwrite, over all steps of the operands.
template <typename T, bool kOverwrite, int kN, typename A, typename B>
__device__ void start_gemm(float (&d)[kN][4], const A& a, const B& b) {
  ptx::pin(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < B::kSteps; ++k)
    ptx::wgmma<T, A::kAlong, B::kAlong>(d, a.step(k), b.step(k), k > 0 || !kOverwrite);
  ptx::wgmma_commit();
}

// Starts d += a b with a in registers, four a step.
template <typename T, int kN, int kSteps, typename B>
__device__ void start_gemm(float (&d)[kN][4], uint32_t (&a)[kSteps][4], const B& b) {
  static_assert(kSteps == B::kSteps);
  ptx::pin(d);
  ptx::pin(a);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) ptx::wgmma<T, B::kAlong>(d, a[k], b.step(k), true);
  ptx::wgmma_commit();
}

}  // namespace flashbpt::tile
