// The tiles of the backward kernel, one row a kernel.
#pragma once

#include "../terms.h"

namespace flashbpt::sm80 {

struct AttnBwdConfig {
  static constexpr int kPlaceBytes = 160;  // of what the block works on
  static constexpr int kMostBlockQ = 128;  // kRowPad of attn_params.h

  int element_bytes;
  int head_dim;  // of the tiles; wider heads go in slices (docs/attn_bwd.md)
  int block_q;   // query rows of a step
  int block_k;   // keys that a block owns
  int warps;
  int warps_q;      // S, dP: warps along the rows; the others along the keys
  int warps_k;      // dK, dV: warps along the keys; the others along the columns
  int warps_dq;     // dQ: warps along the rows; the others along the columns
  int parts_dq;     // of its columns: the first is added before dK is computed, the last after
  bool spread_dq;   // the first part is added between the steps of dK's product, not before it:
                    // needs its registers for longer (D 256: 284 and 304 TFLOP/s; D 128: even)
  int stages;       // of Q and dO: 2 where shared memory has room for the next step's
  bool interleave;  // S and dP step by step in turns: fewer waits where a warp's S is small, but
                    // more registers (D 128: 272 TFLOP/s with, 297 without; D 64: 268 and 266)
  int min_blocks;   // blocks that a multiprocessor holds at least: the register budget

  constexpr int threads() const { return 32 * warps; }
  constexpr int row_bytes() const { return head_dim * element_bytes; }
  constexpr int q_bytes() const { return block_q * row_bytes(); }
  constexpr int kv_bytes() const { return block_k * row_bytes(); }
  constexpr int p_bytes() const { return block_q * block_k * element_bytes; }
  constexpr int mask_bytes(int mask_element_bytes) const {
    return mask_element_bytes ? block_q * (block_k * mask_element_bytes + 16) : 0;
  }
  constexpr int smem_bytes(int mask_element_bytes) const {
    return 2 * (kv_bytes() + stages * q_bytes() + p_bytes()) + 3 * block_q * 4 + kPlaceBytes +
           mask_bytes(mask_element_bytes);
  }
  // Registers a thread of dK, dV and the larger of {S, dP} and dQ.
  constexpr int acc_regs() const {
    const int scores = 2 * block_q * block_k, dq = block_q * head_dim / parts_dq;
    return (2 * block_k * head_dim + (scores > dq ? scores : dq)) / threads();
  }
  constexpr int reg_budget() const {
    const int regs = 65536 / (threads() * min_blocks);
    return regs < 255 ? regs : 255;
  }
};

struct AttnBwdKernel {
  const char* name;
  DataType dtype;
  Terms terms;
  AttnBwdConfig config;
};

// 64 x 64 is what the registers hold of dK and dV for four warps at D 128; the second block of the
// multiprocessor fills the barriers, and two blocks with two stages fill its 228 KB to the last
// 1 KB. At D 256 eight warps hold it, one block at a time. Rows with one stage fit devices of 99
// KB, masks of fp32 included.
//                             bytes dim q k warps q k dq parts spread stages mix blocks
inline constexpr AttnBwdConfig kBwd64 = {2, 64, 64, 64, 4, 2, 2, 2, 1, false, 2, true, 3};
inline constexpr AttnBwdConfig kBwd64Mask = {2, 64, 64, 64, 4, 2, 2, 2, 1, false, 2, false, 3};
inline constexpr AttnBwdConfig kBwd64Terms = {2, 64, 64, 64, 4, 2, 2, 2, 1, false, 2, false, 2};
inline constexpr AttnBwdConfig kBwd128 = {2, 128, 64, 64, 4, 2, 2, 2, 2, false, 2, false, 2};
inline constexpr AttnBwdConfig kBwd128Terms = {2, 128, 64, 64, 4, 2, 2, 2, 2, false, 1, false, 2};
inline constexpr AttnBwdConfig kBwd128Bias = {2, 128, 64, 64, 4, 2, 2, 2, 2, true, 1, false, 2};
inline constexpr AttnBwdConfig kBwd256 = {2, 256, 128, 64, 8, 4, 2, 4, 2, true, 1, false, 1};
inline constexpr AttnBwdConfig kBwd256Terms = {2, 256, 64, 64, 8, 2, 2, 2, 1, false, 1, false, 1};
inline constexpr AttnBwdConfig kBwd256Small = {2, 256, 32, 32, 4, 2, 2, 2, 1, false, 1, false, 2};
inline constexpr AttnBwdConfig kBwd64F32 = {4, 64, 64, 64, 4, 2, 2, 2, 1, false, 1, false, 2};
inline constexpr AttnBwdConfig kBwd128F32 = {4, 128, 64, 64, 8, 2, 2, 2, 1, false, 1, false, 1};
inline constexpr AttnBwdConfig kBwd64F32Small = {4, 64, 64, 32, 4, 4, 2, 2, 1, false, 1, false, 2};
inline constexpr AttnBwdConfig kBwd128F32Small = {4, 128, 32,    32, 4,     2, 2,
                                                  2, 1,   false, 1,  false, 2};

inline constexpr AttnBwdKernel kAttnBwdKernels[] = {
    {"attn_bwd_bf16_d64", DataType::kBFloat16, Terms::kNone, kBwd64},
    {"attn_bwd_bf16_d128", DataType::kBFloat16, Terms::kNone, kBwd128},
    {"attn_bwd_bf16_d256", DataType::kBFloat16, Terms::kNone, kBwd256},
    {"attn_bwd_bf16_d64_mask", DataType::kBFloat16, Terms::kMask, kBwd64Mask},
    {"attn_bwd_bf16_d128_mask", DataType::kBFloat16, Terms::kMask, kBwd128Terms},
    {"attn_bwd_bf16_d64_dropout", DataType::kBFloat16, Terms::kDropout, kBwd64Mask},
    {"attn_bwd_bf16_d128_dropout", DataType::kBFloat16, Terms::kDropout, kBwd128Terms},
    {"attn_bwd_bf16_d64_bias", DataType::kBFloat16, Terms::kBias, kBwd64Mask},
    {"attn_bwd_bf16_d128_bias", DataType::kBFloat16, Terms::kBias, kBwd128Bias},
    {"attn_bwd_bf16_d64_terms", DataType::kBFloat16, Terms::kAll, kBwd64Terms},
    {"attn_bwd_bf16_d128_terms", DataType::kBFloat16, Terms::kAll, kBwd128Terms},
    {"attn_bwd_bf16_d256_terms", DataType::kBFloat16, Terms::kAll, kBwd256Terms},
    {"attn_bwd_bf16_d256_small", DataType::kBFloat16, Terms::kAll, kBwd256Small},
    {"attn_bwd_fp16_d64", DataType::kFloat16, Terms::kNone, kBwd64},
    {"attn_bwd_fp16_d128", DataType::kFloat16, Terms::kNone, kBwd128},
    {"attn_bwd_fp16_d256", DataType::kFloat16, Terms::kNone, kBwd256},
    {"attn_bwd_fp16_d64_mask", DataType::kFloat16, Terms::kMask, kBwd64Mask},
    {"attn_bwd_fp16_d128_mask", DataType::kFloat16, Terms::kMask, kBwd128Terms},
    {"attn_bwd_fp16_d64_dropout", DataType::kFloat16, Terms::kDropout, kBwd64Mask},
    {"attn_bwd_fp16_d128_dropout", DataType::kFloat16, Terms::kDropout, kBwd128Terms},
    {"attn_bwd_fp16_d64_bias", DataType::kFloat16, Terms::kBias, kBwd64Mask},
    {"attn_bwd_fp16_d128_bias", DataType::kFloat16, Terms::kBias, kBwd128Bias},
    {"attn_bwd_fp16_d64_terms", DataType::kFloat16, Terms::kAll, kBwd64Terms},
    {"attn_bwd_fp16_d128_terms", DataType::kFloat16, Terms::kAll, kBwd128Terms},
    {"attn_bwd_fp16_d256_terms", DataType::kFloat16, Terms::kAll, kBwd256Terms},
    {"attn_bwd_fp16_d256_small", DataType::kFloat16, Terms::kAll, kBwd256Small},
    {"attn_bwd_fp32_d64", DataType::kFloat32, Terms::kAll, kBwd64F32},
    {"attn_bwd_fp32_d128", DataType::kFloat32, Terms::kAll, kBwd128F32},
    {"attn_bwd_fp32_d64_small", DataType::kFloat32, Terms::kAll, kBwd64F32Small},
    {"attn_bwd_fp32_d128_small", DataType::kFloat32, Terms::kAll, kBwd128F32Small},
};

constexpr bool attn_bwd_configs_fit() {
  for (const AttnBwdKernel& kernel : kAttnBwdKernels) {
    const AttnBwdConfig& c = kernel.config;
    if (c.block_q > AttnBwdConfig::kMostBlockQ || (c.spread_dq && c.parts_dq < 2)) return false;
    // The states of a boolean mask are read for one piece of 64 rows a step.
    if (kernel.terms != Terms::kNone && c.block_q > 64) return false;
    if (c.smem_bytes(most_mask_bytes(kernel.terms)) > 227 * 1024) return false;
    // The reserved 1 KB a block.
    if (c.min_blocks * (c.smem_bytes(0) + 1024) > 228 * 1024) return false;
    // A step has a counter of dQ's turns for each 8 rows, and needs one a slice of heads up to 512.
    if (kernel.terms == Terms::kAll && (512 + c.head_dim - 1) / c.head_dim > c.block_q / 8)
      return false;
    // 40 registers are left for fragments and addresses.
    if (c.acc_regs() + 40 > c.reg_budget()) return false;
  }
  return true;
}
static_assert(attn_bwd_configs_fit(), "a row of kAttnBwdKernels exceeds its budget");

}  // namespace flashbpt::sm80
