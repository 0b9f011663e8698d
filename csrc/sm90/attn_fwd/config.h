// The tiles of the Hopper forward kernel, one row a kernel.
#pragma once

#include "../../params.h"

namespace flashbpt::sm90 {

struct AttnFwdConfig {
  int head_dim;    // of the tiles; narrower heads are filled with zeros
  int block_k;     // keys of a tile
  int warpgroups;  // that compute, 64 query rows each; one more copies
  int q_stages;    // tiles of Q; 2: that of the next work comes early
  int stages;      // tiles of K, and of V
  int copy_regs;   // registers a thread of the warpgroup that copies
  int math_regs;   // and of those that compute

  constexpr int block_q() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int row_bytes() const { return (head_dim + 63) / 64 * 128; }
  constexpr int q_bytes() const { return block_q() * row_bytes(); }
  constexpr int kv_bytes() const { return block_k * row_bytes(); }
  // 1024: barriers and what is being worked on, and tiles begin at multiples of that.
  constexpr int smem_bytes() const { return q_stages * q_bytes() + 2 * stages * kv_bytes() + 1024; }
  // Registers a thread of O, S and P twice.
  constexpr int acc_regs() const { return head_dim / 2 + block_k; }
};

// terms: what changes scores before the softmax, beside a positive scale, causal, windows and
// sinks; their code costs the others 3 %.
struct AttnFwdKernel {
  const char* name;
  DataType dtype;
  bool terms;
  AttnFwdConfig config;
};

// P of one tile is read by the tensor cores while that of the next is made, so a row's registers
// are O, S and two P in 16 bits. D 64 would leave half of them idle in two warpgroups: three share
// the keys, and their exponentials hide behind the others' products.
//                                       dim keys groups q stages copy math
inline constexpr AttnFwdConfig kFwd64 = {64, 96, 3, 2, 3, 32, 160};     // registers bind
inline constexpr AttnFwdConfig kFwd128 = {128, 128, 2, 1, 2, 40, 232};  // shared memory binds
inline constexpr AttnFwdConfig kFwd256 = {256, 64, 2, 1, 2, 24, 240};   // and registers

inline constexpr AttnFwdKernel kAttnFwdKernels[] = {
    {"attn_fwd_bf16_d64", DataType::kBFloat16, false, kFwd64},
    {"attn_fwd_bf16_d128", DataType::kBFloat16, false, kFwd128},
    {"attn_fwd_bf16_d256", DataType::kBFloat16, false, kFwd256},
    {"attn_fwd_bf16_d64_terms", DataType::kBFloat16, true, kFwd64},
    {"attn_fwd_bf16_d128_terms", DataType::kBFloat16, true, kFwd128},
    {"attn_fwd_bf16_d256_terms", DataType::kBFloat16, true, kFwd256},
    {"attn_fwd_fp16_d64", DataType::kFloat16, false, kFwd64},
    {"attn_fwd_fp16_d128", DataType::kFloat16, false, kFwd128},
    {"attn_fwd_fp16_d256", DataType::kFloat16, false, kFwd256},
    {"attn_fwd_fp16_d64_terms", DataType::kFloat16, true, kFwd64},
    {"attn_fwd_fp16_d128_terms", DataType::kFloat16, true, kFwd128},
    {"attn_fwd_fp16_d256_terms", DataType::kFloat16, true, kFwd256},
};

constexpr bool attn_fwd_configs_fit() {
  for (const AttnFwdKernel& kernel : kAttnFwdKernels) {
    const AttnFwdConfig& c = kernel.config;
    if (c.smem_bytes() > 227 * 1024) return false;
    // The pool is what the launch takes: a multiple of 8 a thread.
    const int launched = 65536 / c.threads() / 8 * 8;
    if (c.copy_regs + c.warpgroups * c.math_regs > (c.warpgroups + 1) * launched) return false;
    if (c.acc_regs() + 30 > c.math_regs) return false;
    if (c.head_dim % 32 != 0 || c.block_k % 16 != 0) return false;
  }
  return true;
}
static_assert(attn_fwd_configs_fit(), "a row of kAttnFwdKernels exceeds its budget");

}  // namespace flashbpt::sm90
