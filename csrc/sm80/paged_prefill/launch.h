#pragma once

#include <cuda_runtime_api.h>

#include "../../paged_params.h"
#include "../attn_params.h"

namespace flashbpt::sm80 {

// Requests of more than paged_decode_rows(): attn_fwd with keys in pages. Caches of query's type
// without scales, no tree, contiguous cu_seqlens_q.
bool paged_prefill_serves(const PagedParams& p, const DeviceLimits& device);
const char* paged_prefill_kernel(const PagedParams& p, const DeviceLimits& device);

// In how many parts keys should be split so that few rows fill the device; of the parts, only the
// rows of this kernel are written.
int paged_prefill_splits(const PagedParams& p, const DeviceLimits& device);
void launch_paged_prefill(const PagedParams& p, const KeySplits& splits, const DeviceLimits& device,
                          cudaStream_t stream);

}  // namespace flashbpt::sm80
