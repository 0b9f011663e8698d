// Host side of the CUDA backend sm90, the kernels for Hopper: csrc/sm90.
#include "attention_backends.h"

#ifdef FLASHBPT_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "device_limits.h"
#include "sm90/attn_fwd/launch.h"
#include "stream_words.h"
#endif

namespace flashbpt {

#ifdef FLASHBPT_WITH_CUDA

const char* refusal_sm90(const AttentionCall& call) {
  const cudaDeviceProp& gpu = *at::cuda::getDeviceProperties(call.q.get_device());
  if (gpu.major != 9) return "the GPU is not of compute capability 9.0";
  const at::ScalarType dtype = call.q.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return "it takes bfloat16 and float16";
  return sm90::attn_fwd_refusal(call.params, device_limits(call.q));
}

std::string kernel_sm90(const AttentionCall& call) {
  return sm90::attn_fwd_kernel(call.params);
}

void forward_sm90(const AttentionCall& call, ForwardTensors& t) {
  if (call.has_empty_dimension()) return forward_aten(call, t);
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  sm90::launch_attn_fwd(call.params, mask_tiles_view(t.mask_tiles), device_limits(call.q),
                        stream_words(stream).counters, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  if (call.params.drops_all()) t.out.zero_();
}

#else

// A build without the CUDA part refuses every call of the backend.
const char* refusal_sm90(const AttentionCall&) {
  return "this build has no CUDA part";
}
std::string kernel_sm90(const AttentionCall&) {
  return {};
}
void forward_sm90(const AttentionCall&, ForwardTensors&) {}

#endif

}  // namespace flashbpt
