// cache[slot] = row / scale, keys rotated before: (a, b) -> (a cos - b sin, b cos + a sin).
//
// Who does what: a thread takes kWidth neighbouring elements of one row; of keys that are rotated
// it reads their partners too. Blocks of the second half of the grid take values.
//
// Barriers: none. A slot is written by its own row's threads; two rows with one slot are an error
// of the caller.
//
// docs/paged.md
#pragma once

#include <cuda_fp8.h>

#include "../../ptx/grid.h"
#include "../../tile/vector.h"
#include "config.h"
#include "launch.h"

namespace flashbpt::sm80 {

template <typename T>
struct AppendKv {
  static constexpr int kWidth = kAppendKvConfig.width;
  using Elements = float[kWidth];

  const AppendKvParams& p;
  const AppendRows& rows;

  // Elements [at, at + kWidth) of a row; 0 past its end.
  __device__ void load(Elements& x, const T* row, int at) const {
    constexpr int kVector = 16 / sizeof(T);
    if (rows.vectorised && at + kWidth <= rows.width) {
#pragma unroll
      for (int i = 0; i < kWidth; i += kVector) {
        const auto v = *reinterpret_cast<const tile::Vector<T, kVector>*>(row + at + i);
#pragma unroll
        for (int j = 0; j < kVector; ++j) x[i + j] = v.get(j);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        x[i] = at + i < rows.width ? tile::Element<T>::to_float(row[at + i]) : 0.0f;
    }
  }

  // Pairs (i, i + half) or (2 i, 2 i + 1) among the first 2 half columns.
  __device__ void rotate(Elements& x, const T* row, int at, int64_t token) const {
    const int64_t position = p.positions ? p.positions[token] : token;
    const float *cos = p.cos + position * p.half, *sin = p.sin + position * p.half;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const int c = at + i;
      if (c >= 2 * p.half) continue;
      const int pair = p.interleaved ? c / 2 : c % p.half;
      const bool second = p.interleaved ? c % 2 : c >= p.half;
      const int partner = p.interleaved ? c ^ 1 : (second ? c - p.half : c + p.half);
      const float other = tile::Element<T>::to_float(row[partner]);
      x[i] = second ? x[i] * cos[pair] + other * sin[pair] : x[i] * cos[pair] - other * sin[pair];
    }
  }

  __device__ void store(const Elements& x, int64_t offset, int at) const {
    const int there = min(kWidth, rows.width - at);
    if (rows.cache.type == CacheType::kSame) {
      constexpr int kVector = 16 / sizeof(T);
      T* const to = static_cast<T*>(rows.cache.data) + offset + at;
      if (rows.vectorised && there == kWidth) {
#pragma unroll
        for (int i = 0; i < kWidth; i += kVector)
          *reinterpret_cast<tile::Vector<T, kVector>*>(to + i) =
              tile::Vector<T, kVector>::round(x + i);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (i < there) to[i] = tile::Element<T>::from_float(x[i]);
      }
      return;
    }
    const auto kind = rows.cache.type == CacheType::kFp8E4m3 ? __NV_E4M3 : __NV_E5M2;
    uint8_t* const to = static_cast<uint8_t*>(rows.cache.data) + offset + at;
    uint8_t bytes[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) bytes[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, kind);
    if (rows.vectorised && there == kWidth) {
      uint32_t words[kWidth / 4] = {};
#pragma unroll
      for (int i = 0; i < kWidth; ++i) words[i / 4] |= uint32_t{bytes[i]} << (i % 4 * 8);
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (i < there) to[i] = bytes[i];
    }
  }

  __device__ void run(int64_t index, bool keys) const {
    const int pieces = (rows.width + kWidth - 1) / kWidth;
    const int at = static_cast<int>(index % pieces) * kWidth;
    const int head = static_cast<int>(index / pieces % p.heads);
    const int64_t token = index / pieces / p.heads;
    if (token >= p.tokens) return;
    const int64_t slot = p.slots[token];
    if (slot < 0) return;
    const T* const row =
        static_cast<const T*>(rows.rows.data) + token * rows.rows.row + head * rows.rows.head;
    Elements x;
    load(x, row, at);
    if (keys && p.cos != nullptr && at < 2 * p.half) rotate(x, row, at, token);
    const CacheView& cache = rows.cache;
    if (cache.scale != nullptr) {
      const float scale = cache.scale[head * cache.scale_stride];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] /= scale;
    }
    store(x, slot / p.page_size * cache.page + slot % p.page_size * cache.token + head * cache.head,
          at);
  }
};

// key_blocks: of the grid, those that take keys.
template <typename T>
__global__ void __launch_bounds__(kAppendKvConfig.block_threads)
    append_kv_kernel(const __grid_constant__ AppendKvParams p, const unsigned key_blocks) {
  ptx::follow_earlier_grids();
  const bool keys = blockIdx.x < key_blocks;
  const int64_t block = keys ? blockIdx.x : blockIdx.x - key_blocks;
  AppendKv<T>{p, keys ? p.key : p.value}.run(block * kAppendKvConfig.block_threads + threadIdx.x,
                                             keys);
}

}  // namespace flashbpt::sm80
