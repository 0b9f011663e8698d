// The tiles of the Hopper forward kernel, one row a kernel.
#pragma once

#include "../../params.h"

namespace flashbpt::sm90 {

struct AttnFwdConfig {
  int head_dim;     // of the tiles of Q and K; narrower heads are filled with zeros
  int dim_v;        // of those of V and O
  int block_k;      // keys of a tile
  int warpgroups;   // that compute, 64 query rows each; one more finds works and copies
  int q_stages;     // tiles of Q; 2: that of the next work comes early
  int stages;       // tiles of K and V together
  int bias_stages;  // tiles of an additive mask
  int copy_regs;    // registers a thread of the warpgroup that copies
  int math_regs;    // and of those that compute
  int blocks = 1;   // of a multiprocessor

  static constexpr int row_bytes(int dim) { return (dim + 63) / 64 * 128; }
  constexpr int block_q() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int q_bytes() const { return block_q() * row_bytes(head_dim); }
  constexpr int stage_bytes() const {
    return block_k * row_bytes(head_dim > dim_v ? head_dim : dim_v);
  }
  constexpr int bias_bytes() const { return block_q() * row_bytes(block_k); }
  // 1024: barriers and what is being worked on, and tiles begin at multiples of that.
  constexpr int smem_bytes() const {
    return q_stages * q_bytes() + stages * stage_bytes() + bias_stages * bias_bytes() + 1024;
  }
  // Registers a thread of O, S and P twice.
  constexpr int acc_regs() const { return dim_v / 2 + block_k; }
};

// What a kernel has besides causal, windows and sinks.
enum class Extras {
  kNone,
  kShort,  // nothing; for few keys: several small blocks, since one would wait most of the time
  kTerms,  // what changes scores before the softmax: their code costs the others 3 %
  kPages,  // keys in pages; the copying warps take registers from those that compute
  kMasks,  // boolean and additive ones
  kAll     // dropout, masks and terms; so much code that it does not fit the instruction cache
};

constexpr bool has_masks(Extras extras) {
  return extras == Extras::kMasks || extras == Extras::kAll;
}
constexpr bool has_terms(Extras extras) {
  return extras == Extras::kTerms || extras == Extras::kAll;
}

// Kernels that are compiled together.
constexpr Extras unit_of(Extras extras) {
  return extras == Extras::kNone || extras == Extras::kShort ? Extras::kTerms : extras;
}

struct AttnFwdKernel {
  const char* name;
  DataType dtype;
  Extras extras;
  AttnFwdConfig config;
};

// P of one tile is read by the tensor cores while that of the next is made, so a row's registers
// are O, S and two P in 16 bits. D 64 would leave half of them idle in two warpgroups: three share
// the keys, and their exponentials hide behind the others' products. Two tiles of Q are worth more
// than a sixth of K and V.
//                                             q, k    v keys groups q stages bias copy math
inline constexpr AttnFwdConfig kFwd64 = {64, 64, 96, 3, 2, 8, 0, 32, 160};          // registers
inline constexpr AttnFwdConfig kFwd64Short = {64, 64, 64, 1, 2, 6, 0, 32, 128, 3};  // registers
inline constexpr AttnFwdConfig kFwd64Masks = {64, 64, 64, 3, 2, 8, 2, 56, 152};     // registers
inline constexpr AttnFwdConfig kFwd96 = {96, 96, 128, 2, 2, 5, 0, 40, 232};         // shared memory
inline constexpr AttnFwdConfig kFwd96Pages = {96, 96, 128, 2, 2, 5, 0, 56, 224};    // shared memory
inline constexpr AttnFwdConfig kFwd128 = {128, 128, 128, 2, 2, 5, 0, 40, 232};      // shared memory
inline constexpr AttnFwdConfig kFwd128Pages = {128, 128, 128, 2, 2, 5, 0, 56, 224};  // both
inline constexpr AttnFwdConfig kFwd128Masks = {128, 128, 128, 2, 1, 4, 2, 56, 224};  // both
inline constexpr AttnFwdConfig kFwd192 = {192, 128, 96, 2, 1, 4, 0, 40, 232};       // shared memory
inline constexpr AttnFwdConfig kFwd192Pages = {192, 128, 96, 2, 1, 4, 0, 56, 224};  // both
inline constexpr AttnFwdConfig kFwd256 = {256, 256, 64, 2, 1, 5, 0, 40, 232};       // both
inline constexpr AttnFwdConfig kFwd256Pages = {256, 256, 64, 2, 1, 5, 0, 56, 224};  // both
inline constexpr AttnFwdConfig kFwd256Masks = {256, 256, 64, 2, 1, 4, 2, 56, 224};  // both

// Of one type and what it has, the narrowest first: the first one that holds a head serves it.
inline constexpr AttnFwdKernel kAttnFwdKernels[] = {
    {"attn_fwd_bf16_d64_short", DataType::kBFloat16, Extras::kShort, kFwd64Short},
    {"attn_fwd_bf16_d64", DataType::kBFloat16, Extras::kNone, kFwd64},
    {"attn_fwd_bf16_d96", DataType::kBFloat16, Extras::kNone, kFwd96},
    {"attn_fwd_bf16_d128", DataType::kBFloat16, Extras::kNone, kFwd128},
    {"attn_fwd_bf16_d192", DataType::kBFloat16, Extras::kNone, kFwd192},
    {"attn_fwd_bf16_d256", DataType::kBFloat16, Extras::kNone, kFwd256},
    {"attn_fwd_bf16_d64_terms", DataType::kBFloat16, Extras::kTerms, kFwd64},
    {"attn_fwd_bf16_d96_terms", DataType::kBFloat16, Extras::kTerms, kFwd96},
    {"attn_fwd_bf16_d128_terms", DataType::kBFloat16, Extras::kTerms, kFwd128},
    {"attn_fwd_bf16_d192_terms", DataType::kBFloat16, Extras::kTerms, kFwd192},
    {"attn_fwd_bf16_d256_terms", DataType::kBFloat16, Extras::kTerms, kFwd256},
    {"attn_fwd_bf16_d64_pages", DataType::kBFloat16, Extras::kPages, kFwd64},
    {"attn_fwd_bf16_d96_pages", DataType::kBFloat16, Extras::kPages, kFwd96Pages},
    {"attn_fwd_bf16_d128_pages", DataType::kBFloat16, Extras::kPages, kFwd128Pages},
    {"attn_fwd_bf16_d192_pages", DataType::kBFloat16, Extras::kPages, kFwd192Pages},
    {"attn_fwd_bf16_d256_pages", DataType::kBFloat16, Extras::kPages, kFwd256Pages},
    {"attn_fwd_bf16_d64_masks", DataType::kBFloat16, Extras::kMasks, kFwd64Masks},
    {"attn_fwd_bf16_d128_masks", DataType::kBFloat16, Extras::kMasks, kFwd128Masks},
    {"attn_fwd_bf16_d256_masks", DataType::kBFloat16, Extras::kMasks, kFwd256Masks},
    {"attn_fwd_bf16_d64_all", DataType::kBFloat16, Extras::kAll, kFwd64Masks},
    {"attn_fwd_bf16_d128_all", DataType::kBFloat16, Extras::kAll, kFwd128Masks},
    {"attn_fwd_bf16_d256_all", DataType::kBFloat16, Extras::kAll, kFwd256Masks},
    {"attn_fwd_fp16_d64_short", DataType::kFloat16, Extras::kShort, kFwd64Short},
    {"attn_fwd_fp16_d64", DataType::kFloat16, Extras::kNone, kFwd64},
    {"attn_fwd_fp16_d96", DataType::kFloat16, Extras::kNone, kFwd96},
    {"attn_fwd_fp16_d128", DataType::kFloat16, Extras::kNone, kFwd128},
    {"attn_fwd_fp16_d192", DataType::kFloat16, Extras::kNone, kFwd192},
    {"attn_fwd_fp16_d256", DataType::kFloat16, Extras::kNone, kFwd256},
    {"attn_fwd_fp16_d64_terms", DataType::kFloat16, Extras::kTerms, kFwd64},
    {"attn_fwd_fp16_d96_terms", DataType::kFloat16, Extras::kTerms, kFwd96},
    {"attn_fwd_fp16_d128_terms", DataType::kFloat16, Extras::kTerms, kFwd128},
    {"attn_fwd_fp16_d192_terms", DataType::kFloat16, Extras::kTerms, kFwd192},
    {"attn_fwd_fp16_d256_terms", DataType::kFloat16, Extras::kTerms, kFwd256},
    {"attn_fwd_fp16_d64_pages", DataType::kFloat16, Extras::kPages, kFwd64},
    {"attn_fwd_fp16_d96_pages", DataType::kFloat16, Extras::kPages, kFwd96Pages},
    {"attn_fwd_fp16_d128_pages", DataType::kFloat16, Extras::kPages, kFwd128Pages},
    {"attn_fwd_fp16_d192_pages", DataType::kFloat16, Extras::kPages, kFwd192Pages},
    {"attn_fwd_fp16_d256_pages", DataType::kFloat16, Extras::kPages, kFwd256Pages},
    {"attn_fwd_fp16_d64_masks", DataType::kFloat16, Extras::kMasks, kFwd64Masks},
    {"attn_fwd_fp16_d128_masks", DataType::kFloat16, Extras::kMasks, kFwd128Masks},
    {"attn_fwd_fp16_d256_masks", DataType::kFloat16, Extras::kMasks, kFwd256Masks},
    {"attn_fwd_fp16_d64_all", DataType::kFloat16, Extras::kAll, kFwd64Masks},
    {"attn_fwd_fp16_d128_all", DataType::kFloat16, Extras::kAll, kFwd128Masks},
    {"attn_fwd_fp16_d256_all", DataType::kFloat16, Extras::kAll, kFwd256Masks},
};

constexpr bool attn_fwd_configs_fit() {
  for (const AttnFwdKernel& kernel : kAttnFwdKernels) {
    const AttnFwdConfig& c = kernel.config;
    // 1 KB of each block is the system's.
    if (c.blocks * (c.smem_bytes() + 1024) > 228 * 1024) return false;
    // A warpgroup that sees none of the last tiles holds the last V that it reads until those have
    // come: there has to be room for them beside it.
    const int passed = (64 * (c.warpgroups - 1) + c.block_k - 1) / c.block_k;
    if (2 * passed >= c.stages || c.stages < 3) return false;
    // The pool is what the launch takes: a multiple of 8 a thread.
    const int launched = 65536 / (c.blocks * c.threads()) / 8 * 8;
    if (c.copy_regs + c.warpgroups * c.math_regs > (c.warpgroups + 1) * launched) return false;
    if (c.acc_regs() + 24 > c.math_regs) return false;
    if (c.head_dim % 32 != 0 || c.dim_v % 32 != 0 || c.block_k % 16 != 0) return false;
  }
  return true;
}
static_assert(attn_fwd_configs_fit(), "a row of kAttnFwdKernels exceeds its budget");

}  // namespace flashbpt::sm90
