// The tiles of the kernel of the terms' gradients, one row a kernel.
#pragma once

#include "../attn_bwd/config.h"

namespace flashbpt::sm80 {

struct AttnBwdTermsKernel {
  static constexpr Terms terms = Terms::kAll;

  const char* name;
  DataType dtype;
  AttnBwdConfig config;

  // Registers a thread of S, dP and the sum.
  constexpr int acc_regs() const { return 3 * config.block_q * config.block_k / config.threads(); }
};

// One stage: other blocks hide the copies. What the backward has for its other products stays 0.
constexpr AttnBwdConfig attn_bwd_terms_config(int element_bytes, int head_dim, int block_q,
                                              int block_k, int warps, int warps_q, int min_blocks) {
  AttnBwdConfig c{};
  c.element_bytes = element_bytes;
  c.head_dim = head_dim;
  c.block_q = block_q;
  c.block_k = block_k;
  c.warps = warps;
  c.warps_q = warps_q;
  c.stages = 1;
  c.parts_dq = 1;
  c.min_blocks = min_blocks;
  return c;
}

// Two blocks of 64 x 64 fill shared memory at D 128 and the registers at D 64. At D 256 one block
// of eight warps fills shared memory. The small rows fit devices of 99 KB, masks of fp32 included.
//                                                      bytes dim  q   k  warps q blocks
inline constexpr auto kTerms64 = attn_bwd_terms_config(2, 64, 64, 64, 4, 2, 2);
inline constexpr auto kTerms128 = attn_bwd_terms_config(2, 128, 64, 64, 4, 2, 2);
inline constexpr auto kTerms256 = attn_bwd_terms_config(2, 256, 64, 64, 8, 2, 1);
inline constexpr auto kTerms256Small = attn_bwd_terms_config(2, 256, 32, 32, 4, 2, 2);
inline constexpr auto kTerms64Fp32 = attn_bwd_terms_config(4, 64, 64, 32, 4, 4, 2);
inline constexpr auto kTerms128Fp32 = attn_bwd_terms_config(4, 128, 32, 32, 4, 2, 2);

inline constexpr AttnBwdTermsKernel kAttnBwdTermsKernels[] = {
    {"attn_bwd_terms_bf16_d64", DataType::kBFloat16, kTerms64},
    {"attn_bwd_terms_bf16_d128", DataType::kBFloat16, kTerms128},
    {"attn_bwd_terms_bf16_d256", DataType::kBFloat16, kTerms256},
    {"attn_bwd_terms_bf16_d256_small", DataType::kBFloat16, kTerms256Small},
    {"attn_bwd_terms_fp16_d64", DataType::kFloat16, kTerms64},
    {"attn_bwd_terms_fp16_d128", DataType::kFloat16, kTerms128},
    {"attn_bwd_terms_fp16_d256", DataType::kFloat16, kTerms256},
    {"attn_bwd_terms_fp16_d256_small", DataType::kFloat16, kTerms256Small},
    {"attn_bwd_terms_fp32_d64", DataType::kFloat32, kTerms64Fp32},
    {"attn_bwd_terms_fp32_d128", DataType::kFloat32, kTerms128Fp32},
};

constexpr bool attn_bwd_terms_configs_fit() {
  for (const AttnBwdTermsKernel& kernel : kAttnBwdTermsKernels) {
    const AttnBwdConfig& c = kernel.config;
    // The reserved 1 KB a block.
    if (c.min_blocks * (c.smem_bytes(4) + 1024) > 228 * 1024) return false;
    // 40 registers are left for fragments and addresses.
    if (kernel.acc_regs() + 40 > c.reg_budget()) return false;
    // The sum passes through the place of P and dS.
    if (2 * c.p_bytes() < 4 * c.block_q * c.block_k) return false;
  }
  return true;
}
static_assert(attn_bwd_terms_configs_fit(), "a row of kAttnBwdTermsKernels exceeds its budget");

}  // namespace flashbpt::sm80
