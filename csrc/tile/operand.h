// Operands of the warp's matrix product, d += a b, read from shared memory or kept in registers.
//
// One step of the product covers 32 bytes of the inner dimension: kInner = 16 elements of 16 bits,
// or 8 of fp32 (as TF32). load(step, ...) fills the registers of one step, in the layout of
// ptx/mma.h; with `g` = lane / 4, `t` = lane % 4.
//
// fp32 has no transposing load. Its transposed operands come by single words, and index the inner
// dimension in pairs: inner index t is element 2 t of the step, t + 4 is 2 t + 1, which
// accumulators that become operands (`RegistersA`) ask for and which meets no bank conflict. Both
// operands of a product must use one order (kPairs); ldmatrix brings the natural one.
#pragma once

#include "../ptx/ldmatrix.h"
#include "../ptx/shared.h"
#include "element.h"
#include "smem_tile.h"

namespace flashbpt::tile {

template <typename T>
constexpr int kInner = 32 / static_cast<int>(sizeof(T));

// a [16 kM, inner], stored as rows of the inner dimension. kPairs: the order of fp32, see above.
template <typename T, int kM, typename Tile, bool kPairs = false>
struct SmemA {
  static constexpr bool kAnyStep = true;
  static constexpr bool kPairsFp32 = kPairs && sizeof(T) == 4;
  uint32_t address;

  // `row`: the first of the 16 kM rows, a multiple of 8.
  __device__ SmemA(Tile tile, int row) {
    const int lane = threadIdx.x % 32;
    address = kPairsFp32 ? tile.chunk(row + lane / 4, lane % 4 / 2) + lane % 2 * 8
                         : tile.chunk(row + lane % 16, lane / 16);
  }
  __device__ void load(int step, uint32_t (&a)[kM][4]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const uint32_t at = Tile::advance(address, step) + m * 16 * Tile::kRowBytes;
      if constexpr (kPairsFp32) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 pair = ptx::load_shared_float2(at + half * 8 * Tile::kRowBytes);
          a[m][half] = __float_as_uint(pair.x);
          a[m][half + 2] = __float_as_uint(pair.y);
        }
      } else {
        ptx::ldmatrix_x4(a[m][0], a[m][1], a[m][2], a[m][3], at);
      }
    }
  }
};

// a [16 kM, inner], stored transposed: rows of the outer dimension.
template <typename T, int kM, typename Tile>
struct SmemTransposedA {
  static constexpr bool kAnyStep = true;
  uint32_t address;
  Tile tile;
  int col;

  // `col`: the first of the 16 kM columns of the tile, a multiple of 16 kM.
  __device__ SmemTransposedA(Tile tile, int col) : tile(tile), col(col) {
    const int lane = threadIdx.x % 32;
    address = Tile::advance(tile.chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2), col / 16);
  }
  __device__ void load(int step, uint32_t (&a)[kM][4]) const {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
        ptx::ldmatrix_x4_trans(a[m][0], a[m][1], a[m][2], a[m][3],
                               Tile::advance(address, m) + step * 16 * Tile::kRowBytes);
    } else {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[m][i] = ptx::load_shared(
              tile.at(step * 8 + 2 * t + i / 2, (col + m * 16 + g + i % 2 * 8) * 4));
    }
  }
};

// b [inner, 8 kN], stored as rows of the inner dimension: row n of the tile is column n of b.
template <typename T, int kN, typename Tile>
struct SmemB {
  static_assert(kN % 2 == 0);
  uint32_t address;

  // `row`: the first of the 8 kN rows, a multiple of 8.
  __device__ SmemB(Tile tile, int row) {
    const int lane = threadIdx.x % 32;
    address = tile.chunk(row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
  // Columns 16 pair ... 16 pair + 15, two registers for each eight.
  __device__ void load(int step, int pair, uint32_t (&b)[2][2]) const {
    ptx::ldmatrix_x4(b[0][0], b[0][1], b[1][0], b[1][1],
                     Tile::advance(address, step) + pair * 16 * Tile::kRowBytes);
  }
};

// b [inner, 8 kN], stored as rows of its columns: row k of the tile is row k of b. kPairs: as
// above.
template <typename T, int kN, typename Tile, bool kPairs = true>
struct SmemTransposedB {
  static_assert(kN % 2 == 0);
  uint32_t address;
  Tile tile;
  int col;

  // `col`: the first of the 8 kN columns of the tile, a multiple of 8 kN.
  __device__ SmemTransposedB(Tile tile, int col) : tile(tile), col(col) {
    const int lane = threadIdx.x % 32;
    address = Tile::advance(tile.chunk(lane % 16, lane / 16), col / 16);
  }
  __device__ void load(int step, int pair, uint32_t (&b)[2][2]) const {
    if constexpr (sizeof(T) == 2) {
      ptx::ldmatrix_x4_trans(b[0][0], b[0][1], b[1][0], b[1][1],
                             Tile::advance(address, pair) + step * 16 * Tile::kRowBytes);
    } else {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        b[i / 2][i % 2] =
            ptx::load_shared(tile.at(step * 8 + (kPairs ? 2 * t + i % 2 : t + i % 2 * 4),
                                     (col + pair * 16 + i / 2 * 8 + g) * 4));
    }
  }
};

// The accumulator [16 kM, 8 kN] of a former product as operand a [16 kM, inner = 8 kN]. Pairs of 16
// bits take half the registers of the accumulator.
template <typename T, int kM, int kN>
struct RegistersA {
  static constexpr bool kAnyStep = false;  // registers have no run-time index
  static constexpr int kSteps = 8 * kN / kInner<T>;
  uint32_t packed[kM][kSteps][4];

  __device__ explicit RegistersA(const float (&d)[kM][kN][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t (&a)[4] = packed[m][step];
        if constexpr (sizeof(T) == 2) {
          const float (&low)[4] = d[m][2 * step];
          const float (&high)[4] = d[m][2 * step + 1];
          a[0] = Element<T>::pack(low[0], low[1]);
          a[1] = Element<T>::pack(low[2], low[3]);
          a[2] = Element<T>::pack(high[0], high[1]);
          a[3] = Element<T>::pack(high[2], high[3]);
        } else {
          const float (&x)[4] = d[m][step];
          a[0] = __float_as_uint(x[0]);
          a[1] = __float_as_uint(x[2]);
          a[2] = __float_as_uint(x[1]);
          a[3] = __float_as_uint(x[3]);
        }
      }
  }
  __device__ void load(int step, uint32_t (&a)[kM][4]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m][i] = packed[m][step][i];
  }
};

}  // namespace flashbpt::tile
