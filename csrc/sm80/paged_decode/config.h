// The tiles of the paged decode kernel, one row a kernel.
#pragma once

#include "../../paged_params.h"

namespace flashbpt::sm80 {

struct PagedDecodeConfig {
  // Of items in parts, which are joined: loads of a lane under way, lanes with neighbouring columns
  // at least, and from how many parts on all warps join the same columns.
  static constexpr int kJoinLoads = 8, kJoinLanes = 8, kManyParts = 64;
  static constexpr int kPlaceBytes = 256;  // where the block begins, and what the warps tell it

  int element_bytes;  // of Q as the products take it
  int cache_bytes;    // of an element of the cache
  int head_dim;       // of the tile; narrower heads leave the rest empty
  int rows;           // query rows of a tile: those of a group's heads, one token after the other
  int block_k;        // keys of a warp's step: 16 or 32
  int warps;          // each takes every warps-th step of the keys
  int stages;         // steps whose keys and values a warp has under way or at hand
  int min_blocks;     // blocks that a multiprocessor holds at least: the register budget

  constexpr int threads() const { return 32 * warps; }
  constexpr int row_bytes() const { return head_dim * cache_bytes; }
  constexpr int q_bytes() const { return rows * head_dim * element_bytes; }
  // Of 16 bytes, which a thread loads of Q: rounds of at most eight at a time.
  constexpr int q_rounds() const { return (q_bytes() / (16 * threads()) + 7) / 8; }
  constexpr int q_vectors() const { return q_bytes() / (16 * threads()) / q_rounds(); }
  constexpr int unit_keys() const { return block_k * warps; }
  constexpr int stage_bytes() const { return 2 * block_k * row_bytes(); }
  constexpr int ring_bytes() const { return warps * stages * stage_bytes(); }
  constexpr int smem_bytes() const {
    return ring_bytes() + q_bytes() + 2 * warps * rows * 4 + kPlaceBytes;
  }
  // Columns of O in fp32 that a free stage of a warp's ring has room for, 16 rows of them.
  constexpr int merged_columns() const {
    const int columns = stage_bytes() / (16 * 4);
    return columns < head_dim ? columns : head_dim;
  }
  // Registers a thread of O and S.
  constexpr int acc_regs() const { return rows * (head_dim + block_k) / 32; }
  constexpr int reg_budget() const {
    const int regs = 65536 / (threads() * min_blocks);
    return regs < 255 ? regs : 255;
  }
};

struct PagedDecodeKernel {
  const char* name;
  DataType dtype;  // of the query; caches of fp8 are multiplied as fp16, whatever it is
  CacheType cache;
  PagedDecodeConfig config;
};

// Memory-bound: 4.4 TB/s and 1 us want 33 KB under way on a multiprocessor; the stages of its
// blocks, less the one in use, are 64 KB and more. Rows of 96 KB of stages have a small one beside
// them, for GPUs with 99 KB of shared memory a block.
//                                              bytes cache dim rows keys warps stages blocks
inline constexpr PagedDecodeConfig kPaged64 = {2, 2, 64, 16, 16, 4, 5, 2};
inline constexpr PagedDecodeConfig kPaged128 = {2, 2, 128, 16, 16, 4, 3, 2};
inline constexpr PagedDecodeConfig kPaged128Small = {2, 2, 128, 16, 16, 2, 3, 4};
inline constexpr PagedDecodeConfig kPaged256 = {2, 2, 256, 16, 16, 2, 2, 3};
inline constexpr PagedDecodeConfig kPaged64Tall = {2, 2, 64, 32, 16, 4, 5, 2};
inline constexpr PagedDecodeConfig kPaged128Tall = {2, 2, 128, 32, 16, 4, 2, 2};
inline constexpr PagedDecodeConfig kPaged64Fp8 = {2, 1, 64, 16, 32, 4, 4, 2};
inline constexpr PagedDecodeConfig kPaged128Fp8 = {2, 1, 128, 16, 32, 4, 2, 2};
inline constexpr PagedDecodeConfig kPaged256Fp8 = {2, 1, 256, 16, 16, 4, 2, 2};
inline constexpr PagedDecodeConfig kPaged128Fp8Tall = {2, 1, 128, 32, 16, 4, 4, 2};
inline constexpr PagedDecodeConfig kPaged64F32 = {4, 4, 64, 16, 16, 4, 2, 2};
inline constexpr PagedDecodeConfig kPaged128F32 = {4, 4, 128, 16, 16, 2, 2, 3};
inline constexpr PagedDecodeConfig kPaged256F32 = {4, 4, 256, 16, 16, 1, 2, 2};

inline constexpr PagedDecodeKernel kPagedDecodeKernels[] = {
    {"paged_decode_bf16_d64", DataType::kBFloat16, CacheType::kSame, kPaged64},
    {"paged_decode_bf16_d128", DataType::kBFloat16, CacheType::kSame, kPaged128},
    {"paged_decode_bf16_d128_small", DataType::kBFloat16, CacheType::kSame, kPaged128Small},
    {"paged_decode_bf16_d256", DataType::kBFloat16, CacheType::kSame, kPaged256},
    {"paged_decode_bf16_d64_tall", DataType::kBFloat16, CacheType::kSame, kPaged64Tall},
    {"paged_decode_bf16_d128_tall", DataType::kBFloat16, CacheType::kSame, kPaged128Tall},
    {"paged_decode_fp16_d64", DataType::kFloat16, CacheType::kSame, kPaged64},
    {"paged_decode_fp16_d128", DataType::kFloat16, CacheType::kSame, kPaged128},
    {"paged_decode_fp16_d128_small", DataType::kFloat16, CacheType::kSame, kPaged128Small},
    {"paged_decode_fp16_d256", DataType::kFloat16, CacheType::kSame, kPaged256},
    {"paged_decode_fp16_d64_tall", DataType::kFloat16, CacheType::kSame, kPaged64Tall},
    {"paged_decode_fp16_d128_tall", DataType::kFloat16, CacheType::kSame, kPaged128Tall},
    {"paged_decode_e4m3_d64", DataType::kFloat16, CacheType::kFp8E4m3, kPaged64Fp8},
    {"paged_decode_e4m3_d128", DataType::kFloat16, CacheType::kFp8E4m3, kPaged128Fp8},
    {"paged_decode_e4m3_d256", DataType::kFloat16, CacheType::kFp8E4m3, kPaged256Fp8},
    {"paged_decode_e4m3_d128_tall", DataType::kFloat16, CacheType::kFp8E4m3, kPaged128Fp8Tall},
    {"paged_decode_e5m2_d64", DataType::kFloat16, CacheType::kFp8E5m2, kPaged64Fp8},
    {"paged_decode_e5m2_d128", DataType::kFloat16, CacheType::kFp8E5m2, kPaged128Fp8},
    {"paged_decode_e5m2_d256", DataType::kFloat16, CacheType::kFp8E5m2, kPaged256Fp8},
    {"paged_decode_e5m2_d128_tall", DataType::kFloat16, CacheType::kFp8E5m2, kPaged128Fp8Tall},
    {"paged_decode_fp32_d64", DataType::kFloat32, CacheType::kSame, kPaged64F32},
    {"paged_decode_fp32_d128", DataType::kFloat32, CacheType::kSame, kPaged128F32},
    {"paged_decode_fp32_d256", DataType::kFloat32, CacheType::kSame, kPaged256F32},
};

constexpr bool paged_decode_configs_fit() {
  for (const PagedDecodeKernel& kernel : kPagedDecodeKernels) {
    const PagedDecodeConfig& c = kernel.config;
    if (c.smem_bytes() > 227 * 1024) return false;
    // The reserved 1 KB a block.
    if (c.min_blocks * (c.smem_bytes() + 1024) > 228 * 1024) return false;
    // 40 registers are left for fragments and addresses.
    if (c.acc_regs() + 40 > c.reg_budget()) return false;
  }
  return true;
}
static_assert(paged_decode_configs_fit(), "a row of kPagedDecodeKernels exceeds its budget");

}  // namespace flashbpt::sm80
