// The ops of dropout: the state that a call draws, and the mask that a state stands for.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <mutex>

#include "attention_call.h"
#include "cpu/attention.h"

#ifdef FLASHBPT_WITH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "sm80/dropout_mask/launch.h"
#include "sm80/rng_state/launch.h"
#endif

namespace flashbpt {
namespace {

void draw_on_cpu(int64_t* state) {
  auto generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  state[0] = static_cast<int64_t>(generator->random64());
  state[1] = static_cast<int64_t>(generator->random64());
}

#ifdef FLASHBPT_WITH_CUDA
void draw_on_gpu(const at::Tensor& state, int64_t increment) {
  auto generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      std::nullopt, at::cuda::detail::getDefaultCUDAGenerator(state.get_device()));
  at::PhiloxCudaState drawn;
  {
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    drawn = generator->philox_cuda_state(static_cast<uint64_t>(increment));
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  int64_t* out = state.data_ptr<int64_t>();
  if (drawn.captured_) {
    sm80::launch_rng_state(drawn.seed_.ptr, 0, drawn.offset_.ptr, drawn.offset_intragraph_, out,
                           stream);
  } else {
    sm80::launch_rng_state(nullptr, drawn.seed_.val, nullptr, drawn.offset_.val, out, stream);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
#endif

}  // namespace

at::Tensor dropout_mask(const at::Tensor& rng_state, double p, at::IntArrayRef sizes,
                        at::IntArrayRef offsets) {
  const c10::DeviceGuard device_guard(rng_state.device());
  TORCH_CHECK(sizes.size() == 4 && offsets.size() == 5,
              "flashbpt: dropout_mask takes 4 sizes "
              "(batch, heads, len_q, len_k) and 5 offsets (batch, head, q, k, total_heads); got ",
              sizes.size(), " and ", offsets.size());
  AttentionParams params;
  params.batch_offset = offsets[0];
  params.head_offset = offsets[1];
  params.q_offset = offsets[2];
  params.k_offset = offsets[3];
  params.total_heads = offsets[4] > 0 ? offsets[4] : sizes[1];
  set_dropout(params, p);
  set_rng_state(params, rng_state, rng_state);
  params.batch = sizes[0];
  params.heads_q = params.heads_kv = sizes[1];
  params.len_q = sizes[2];
  params.len_k = sizes[3];
  const auto options = rng_state.options().dtype(at::kBool);
  if (params.dropout_threshold == 0) return at::full(sizes, true, options);
  at::Tensor keep = at::empty(sizes, options);
  if (keep.numel() == 0) return keep;
  if (keep.is_cpu()) {
    cpu::dropout_mask(params, keep.data_ptr<bool>());
    return keep;
  }
#ifdef FLASHBPT_WITH_CUDA
  sm80::launch_dropout_mask(params, keep.data_ptr<bool>(), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return keep;
#else
  TORCH_CHECK(false, "flashbpt: this build makes dropout masks on the CPU only; rng_state is on ",
              rng_state.device());
#endif
}

at::Tensor draw_rng_state(const at::Tensor& like, int64_t increment) {
  const c10::DeviceGuard device_guard(like.device());
  TORCH_CHECK(increment >= 0, "flashbpt: increment must be >= 0, got ", increment);
  at::Tensor state = at::empty({2}, like.options().dtype(at::kLong));
  if (like.is_cpu()) {
    draw_on_cpu(state.data_ptr<int64_t>());
    return state;
  }
#ifdef FLASHBPT_WITH_CUDA
  draw_on_gpu(state, increment);
  return state;
#else
  TORCH_CHECK(false, "flashbpt: this build draws dropout states on the CPU only; got a tensor on ",
              like.device());
#endif
}

}  // namespace flashbpt
