// Keys and values in fp8 as operands of the warp's matrix product: converted to fp16 on the way
// from shared memory to registers.
#pragma once

#include "../../paged_params.h"
#include "../../ptx/fp8.h"
#include "../../ptx/ldmatrix.h"
#include "../../ptx/shared.h"
#include "../../tile/smem_tile.h"

namespace flashbpt::sm80 {

// Bytes kLow and kHigh of x as fp16.
template <CacheType kCache, int kLow, int kHigh>
__device__ uint32_t half_pair(uint32_t x) {
  return kCache == CacheType::kFp8E5m2 ? ptx::e5m2_pair<kLow, kHigh>(x)
                                       : ptx::e4m3_pair<kLow, kHigh>(x);
}

// Operand b of Q K^T. A lane reads four neighbouring bytes of a key: the columns 4 t ... 4 t + 3 of
// each 16 stand where products have 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, in Q too.
template <CacheType kCache, typename Tile>
struct Fp8Keys {
  Tile tile;

  // Where column c of Q belongs.
  static __device__ int q_column(int c) {
    return c / 16 * 16 + c % 16 / 4 * 2 + c % 4 / 2 * 8 + c % 2;
  }
  // Keys 16 pair ... 16 pair + 15.
  __device__ void load(int step, int pair, uint32_t (&b)[2][2]) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t x = ptx::load_shared(tile.at(pair * 16 + n * 8 + g, step * 16 + t * 4));
      b[n][0] = half_pair<kCache, 0, 1>(x);
      b[n][1] = half_pair<kCache, 2, 3>(x);
    }
  }
};

// Operand b of P V. Of 16 columns the even ones are one tile of eight, the odd ones the next.
template <CacheType kCache, typename Tile>
struct Fp8Values {
  uint32_t even, odd;  // addresses of chunks 0 and 1

  __device__ explicit Fp8Values(Tile tile)
      : even(tile.chunk(threadIdx.x % 16, 0)), odd(tile.chunk(threadIdx.x % 16, 1)) {}
  // The column of O that element i of tile n of a lane's accumulator is.
  static __device__ int o_column(int n, int i) {
    return n / 2 * 16 + threadIdx.x % 4 * 4 + i * 2 + n % 2;
  }
  // Of the keys 16 step ... 16 step + 15.
  __device__ void load(int step, int pair, uint32_t (&b)[2][2]) const {
    uint32_t x[2];  // keys 2 t and 2 t + 1 of the columns 2 g and 2 g + 1, and 8 keys further
    ptx::ldmatrix_x2_trans(
        x[0], x[1], Tile::advance(pair % 2 ? odd : even, pair / 2) + step * 16 * Tile::kRowBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b[0][i] = half_pair<kCache, 0, 2>(x[i]);
      b[1][i] = half_pair<kCache, 1, 3>(x[i]);
    }
  }
};

}  // namespace flashbpt::sm80
