// The kernels of one type of cache; a translation unit each, so that they compile side by side.
#pragma once

#include "launch.h"

namespace flashbpt::sm80 {

void launch_paged_decode_bf16(const PagedDecodeParams& p, cudaStream_t stream);
void launch_paged_decode_fp16(const PagedDecodeParams& p, cudaStream_t stream);
void launch_paged_decode_fp32(const PagedDecodeParams& p, cudaStream_t stream);
void launch_paged_decode_e4m3(const PagedDecodeParams& p, cudaStream_t stream);
void launch_paged_decode_e5m2(const PagedDecodeParams& p, cudaStream_t stream);

}  // namespace flashbpt::sm80
