// Host side of paged attention on Hopper: csrc/sm90/attn_fwd for requests of many rows.
#include "paged_backends.h"

#ifdef FLASHBPT_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "device_limits.h"
#include "sm90/attn_fwd/launch.h"
#include "stream_words.h"
#endif

namespace flashbpt {

#ifdef FLASHBPT_WITH_CUDA

const char* refuse_paged_sm90(const PagedCall& call) {
  if (at::cuda::getDeviceProperties(call.q.get_device())->major != 9) {
    return "the GPU is not of compute capability 9.0";
  }
  const at::ScalarType dtype = call.q.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return "it takes bfloat16 and float16";
  if (!has_prefill(call.params)) return "requests of few rows are sm80's";
  return sm90::paged_prefill_refusal(call.params, device_limits(call.q));
}

const char* paged_kernel_sm90(const PagedCall& call) {
  return sm90::paged_prefill_kernel(call.params);
}

void paged_attention_sm90(const PagedCall& call) {
  const c10::cuda::CUDAGuard guard(call.q.device());
  if (call.params.tokens == 0 || call.params.heads_q == 0) return;  // no element to compute
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  sm90::launch_paged_prefill(call.params, static_cast<int>(paged_decode_rows(call.params)),
                             device_limits(call.q), stream_words(stream).counters, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  paged_decode_sm80(call, true);
}

#else

const char* refuse_paged_sm90(const PagedCall&) {
  return "this build has no CUDA part";
}
const char* paged_kernel_sm90(const PagedCall&) {
  return "";
}
void paged_attention_sm90(const PagedCall&) {}

#endif

}  // namespace flashbpt
