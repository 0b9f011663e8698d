#pragma once

#include <cuda_runtime_api.h>

#include "../../paged_params.h"
#include "../attn_params.h"

namespace flashbpt::sm80 {

// Requests of more than paged_decode_rows(): attn_fwd with keys in pages. Caches of query's type
// without scales, no tree, contiguous cu_seqlens_q.
bool paged_prefill_serves(const PagedParams& p, const DeviceLimits& device);
const char* paged_prefill_kernel(const PagedParams& p, const DeviceLimits& device);

// Partial results where the keys of a request are split: part i is out[i * out_stride] and
// lse[i * lse_stride] on, to be merged; part 0 carries the sink.
struct PagedPrefillSplits {
  int32_t count = 1;  // 1: all goes to the call's out and lse
  TensorView out;     // fp32 [tokens, heads_q, dim_v] of part 0
  TensorView lse;     // fp32 [tokens, heads_q] of part 0; only rows of this kernel are written
  int64_t out_stride = 0;
  int64_t lse_stride = 0;
};
// In how many parts keys should be split so that few rows fill the device.
int paged_prefill_splits(const PagedParams& p, const DeviceLimits& device);
void launch_paged_prefill(const PagedParams& p, const PagedPrefillSplits& splits,
                          const DeviceLimits& device, cudaStream_t stream);

}  // namespace flashbpt::sm80
