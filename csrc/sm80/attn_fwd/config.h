// The tiles of the forward kernel, one row a kernel.
#pragma once

#include "../terms.h"

namespace flashbpt::sm80 {

struct AttnFwdConfig {
  static constexpr int kPlaceBytes = 160;  // of what the block works on, and its terms

  int element_bytes;
  int head_dim;  // of the tiles; wider heads go in slices (docs/attn_fwd.md)
  int block_q;   // query rows of a block
  int block_k;   // keys of a tile
  int warps;
  int warps_k;     // 2: pairs of warps share rows, by keys for S and by columns for O
  int min_blocks;  // blocks that a multiprocessor holds at least: the register budget

  constexpr int threads() const { return 32 * warps; }
  constexpr int warp_rows() const { return block_q * warps_k / warps; }
  constexpr int row_bytes() const { return head_dim * element_bytes; }
  constexpr int q_bytes() const { return block_q * row_bytes(); }
  constexpr int kv_bytes() const { return block_k * row_bytes(); }
  constexpr int mask_bytes(int mask_element_bytes) const {
    return mask_element_bytes ? block_q * (block_k * mask_element_bytes + 16) : 0;
  }
  // P and the rows' maxima, which pairs of warps exchange.
  constexpr int pair_bytes() const {
    return warps_k > 1 ? block_q * (block_k * element_bytes + warps_k * 4) : 0;
  }
  constexpr int smem_bytes(int mask_element_bytes) const {
    return q_bytes() + 2 * kv_bytes() + pair_bytes() + kPlaceBytes + mask_bytes(mask_element_bytes);
  }
  // Registers a thread of O and S.
  constexpr int acc_regs() const { return warp_rows() * (head_dim + block_k) / 32 / warps_k; }
  constexpr int reg_budget() const {
    const int regs = 65536 / (threads() * min_blocks);
    return regs < 255 ? regs : 255;
  }
};

// short_rows: for calls whose queries would leave half of a taller tile empty.
struct AttnFwdKernel {
  const char* name;
  DataType dtype;
  Terms terms;
  bool short_rows;
  AttnFwdConfig config;
};

// A warp with 32 rows reads each fragment of keys once for two products. At D 256 the accumulators
// of 16 rows fill the registers, and shared memory, not the tensor cores, would be the limit: pairs
// of warps hold 32 rows together, each half of the columns. Devices with 99 KB take the rows with
// terms.
//                                            bytes dim q   k warps pair blocks
inline constexpr AttnFwdConfig kFwd64 = {2, 64, 128, 128, 4, 1, 2};
inline constexpr AttnFwdConfig kFwd64Terms = {2, 64, 128, 64, 4, 1, 2};
inline constexpr AttnFwdConfig kFwd128 = {2, 128, 128, 64, 4, 1, 2};
inline constexpr AttnFwdConfig kFwd256 = {2, 256, 64, 64, 4, 2, 2};
inline constexpr AttnFwdConfig kFwd256Terms = {2, 256, 64, 32, 4, 1, 2};
inline constexpr AttnFwdConfig kFwd64Short = {2, 64, 64, 64, 4, 1, 3};
inline constexpr AttnFwdConfig kFwd128Short = {2, 128, 64, 64, 4, 1, 2};
inline constexpr AttnFwdConfig kFwd64Fp32 = {4, 64, 64, 64, 4, 2, 3};
inline constexpr AttnFwdConfig kFwd128Fp32 = {4, 128, 64, 32, 4, 2, 2};

// Boolean masks and dropout share kernels here: parting them bought 2 %.
inline constexpr AttnFwdKernel kAttnFwdKernels[] = {
    {"attn_fwd_bf16_d64", DataType::kBFloat16, Terms::kNone, false, kFwd64},
    {"attn_fwd_bf16_d128", DataType::kBFloat16, Terms::kNone, false, kFwd128},
    {"attn_fwd_bf16_d256", DataType::kBFloat16, Terms::kNone, false, kFwd256},
    {"attn_fwd_bf16_d64_dropout", DataType::kBFloat16, Terms::kDropout, false, kFwd64},
    {"attn_fwd_bf16_d128_dropout", DataType::kBFloat16, Terms::kDropout, false, kFwd128},
    {"attn_fwd_bf16_d64_terms", DataType::kBFloat16, Terms::kAll, false, kFwd64Terms},
    {"attn_fwd_bf16_d128_terms", DataType::kBFloat16, Terms::kAll, false, kFwd128},
    {"attn_fwd_bf16_d256_terms", DataType::kBFloat16, Terms::kAll, false, kFwd256Terms},
    {"attn_fwd_bf16_d64_short", DataType::kBFloat16, Terms::kAll, true, kFwd64Short},
    {"attn_fwd_bf16_d128_short", DataType::kBFloat16, Terms::kAll, true, kFwd128Short},
    {"attn_fwd_fp16_d64", DataType::kFloat16, Terms::kNone, false, kFwd64},
    {"attn_fwd_fp16_d128", DataType::kFloat16, Terms::kNone, false, kFwd128},
    {"attn_fwd_fp16_d256", DataType::kFloat16, Terms::kNone, false, kFwd256},
    {"attn_fwd_fp16_d64_dropout", DataType::kFloat16, Terms::kDropout, false, kFwd64},
    {"attn_fwd_fp16_d128_dropout", DataType::kFloat16, Terms::kDropout, false, kFwd128},
    {"attn_fwd_fp16_d64_terms", DataType::kFloat16, Terms::kAll, false, kFwd64Terms},
    {"attn_fwd_fp16_d128_terms", DataType::kFloat16, Terms::kAll, false, kFwd128},
    {"attn_fwd_fp16_d256_terms", DataType::kFloat16, Terms::kAll, false, kFwd256Terms},
    {"attn_fwd_fp16_d64_short", DataType::kFloat16, Terms::kAll, true, kFwd64Short},
    {"attn_fwd_fp16_d128_short", DataType::kFloat16, Terms::kAll, true, kFwd128Short},
    {"attn_fwd_fp32_d64", DataType::kFloat32, Terms::kAll, false, kFwd64Fp32},
    {"attn_fwd_fp32_d128", DataType::kFloat32, Terms::kAll, false, kFwd128Fp32},
};

constexpr bool attn_fwd_configs_fit() {
  for (const AttnFwdKernel& kernel : kAttnFwdKernels) {
    const AttnFwdConfig& c = kernel.config;
    if (c.smem_bytes(0) > 227 * 1024) return false;
    if (kernel.terms == Terms::kAll && c.smem_bytes(4) > 99 * 1024) return false;
    // 50 registers are left for fragments, addresses and the state of the rows.
    if (c.acc_regs() + 50 > c.reg_budget()) return false;
    if (c.warp_rows() % 16 != 0 || c.block_k % 16 != 0) return false;
  }
  return true;
}
static_assert(attn_fwd_configs_fit(), "a row of kAttnFwdKernels exceeds its budget");

}  // namespace flashbpt::sm80
