// The tiles of the paged prefill kernel, one row a kernel.
#pragma once

#include "../attn_fwd/config.h"
#include "../paged_keys.h"

namespace flashbpt::sm80 {

// Those of attn_fwd, and where the keys of two tiles lie.
struct PagedPrefillKernel {
  const char* name;
  DataType dtype;
  Terms terms;
  AttnFwdConfig config;

  constexpr int smem_bytes() const {
    return config.smem_bytes(0) + paged_tile_bytes(config.block_k);
  }
};

inline constexpr PagedPrefillKernel kPagedPrefillKernels[] = {
    {"paged_prefill_bf16_d64", DataType::kBFloat16, Terms::kNone, kFwd64},
    {"paged_prefill_bf16_d128", DataType::kBFloat16, Terms::kNone, kFwd128},
    {"paged_prefill_bf16_d256", DataType::kBFloat16, Terms::kNone, kFwd256},
    {"paged_prefill_bf16_d64_terms", DataType::kBFloat16, Terms::kAll, kFwd64Terms},
    {"paged_prefill_bf16_d128_terms", DataType::kBFloat16, Terms::kAll, kFwd128},
    {"paged_prefill_bf16_d256_terms", DataType::kBFloat16, Terms::kAll, kFwd256Terms},
    {"paged_prefill_fp16_d64", DataType::kFloat16, Terms::kNone, kFwd64},
    {"paged_prefill_fp16_d128", DataType::kFloat16, Terms::kNone, kFwd128},
    {"paged_prefill_fp16_d256", DataType::kFloat16, Terms::kNone, kFwd256},
    {"paged_prefill_fp16_d64_terms", DataType::kFloat16, Terms::kAll, kFwd64Terms},
    {"paged_prefill_fp16_d128_terms", DataType::kFloat16, Terms::kAll, kFwd128},
    {"paged_prefill_fp16_d256_terms", DataType::kFloat16, Terms::kAll, kFwd256Terms},
};

constexpr bool paged_prefill_configs_fit() {
  for (const PagedPrefillKernel& kernel : kPagedPrefillKernels) {
    if (kernel.smem_bytes() > 227 * 1024) return false;
    // The reserved 1 KB a block.
    if (kernel.config.min_blocks * (kernel.smem_bytes() + 1024) > 228 * 1024) return false;
  }
  return true;
}
static_assert(paged_prefill_configs_fit(), "a row of kPagedPrefillKernels exceeds its budget");

}  // namespace flashbpt::sm80
