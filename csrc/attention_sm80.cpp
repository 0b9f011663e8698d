// Host side of the CUDA backend sm80: memory and the chain of launches. The kernels: csrc/sm80.
#include "attention_backends.h"

#ifdef FLASHBPT_WITH_CUDA
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cmath>

#include "device_limits.h"
#include "sm80/attn_bwd/launch.h"
#include "sm80/attn_bwd_finish/launch.h"
#include "sm80/attn_bwd_prepare/launch.h"
#include "sm80/attn_bwd_terms/launch.h"
#include "sm80/attn_fwd/launch.h"
#include "sm80/mask_tiles/launch.h"
#include "split_states.h"
#endif

namespace flashbpt {

#ifdef FLASHBPT_WITH_CUDA
namespace {

constexpr int64_t kLargestDim = 512;

// torch's setting at the time of the call.
bool tf32_allowed() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
}

at::Tensor with_unit_columns(const at::Tensor& t) {
  return has_unit_columns(t) ? t : t.contiguous();
}

std::array<int64_t, 4> tile_sizes(const at::Tensor& mask) {
  using Tiles = MaskTiles;
  return {mask.size(0), mask.size(1), (mask.size(2) + Tiles::kRows - 1) / Tiles::kRows,
          (mask.size(3) + Tiles::kCols - 1) / Tiles::kCols};
}

// q, k and v as the kernels read them, and where they run.
struct Inputs {
  at::Tensor q, k, v, tiles;
  DeviceLimits device;
  cudaStream_t stream;

  // tiles: of the boolean mask, made anew where the given ones are missing.
  Inputs(const AttentionCall& call, const std::optional<at::Tensor>& tiles)
      : q(with_unit_columns(call.q)),
        k(with_unit_columns(call.k)),
        v(with_unit_columns(call.v)),
        device(device_limits(call.q)),
        stream(c10::cuda::getCurrentCUDAStream()) {
    if (!call.has_boolean_mask()) return;
    const at::Tensor& mask = *call.options.mask;
    const bool saved = tiles && tiles->defined() && tiles->scalar_type() == at::kByte &&
                       tiles->is_cuda() && tiles->sizes() == at::IntArrayRef(tile_sizes(mask));
    this->tiles = saved ? tiles->contiguous() : mask_tiles(mask);
  }

  template <typename Params>
  void set(const AttentionCall& call, Params& p) const {
    p.q = call.view(q);
    p.k = call.view(k);
    p.v = call.view(v);
    p.tf32 = q.scalar_type() == at::kFloat && tf32_allowed();
    p.mask_tiles = mask_tiles_view(tiles);
  }
};

}  // namespace

const char* refusal_sm80(const AttentionCall& call) {
  if (call.acc == at::kDouble) return "it takes float32, bfloat16 and float16";
  if (std::max(call.params.dim, call.params.dim_v) > kLargestDim) {
    return "it takes head dims up to 512";
  }
  const cudaDeviceProp& gpu = *at::cuda::getDeviceProperties(call.q.get_device());
  return gpu.major >= 8 ? nullptr : "the GPU is older than compute capability 8.0";
}

std::string kernel_sm80(const AttentionCall& call, bool backward) {
  const DeviceLimits device = device_limits(call.q);
  if (backward) return sm80::attn_bwd_kernel(call.params, device);
  AttentionParams p = call.params;
  if (p.drops_all()) p.dropout_threshold = 0;  // as the forward does
  return sm80::attn_fwd_kernel(p, device);
}

at::Tensor mask_tiles(const at::Tensor& mask) {
  at::Tensor tiles = at::empty(tile_sizes(mask), mask.options().dtype(at::kByte));
  if (tiles.numel() == 0) return tiles;
  sm80::launch_mask_tiles(broadcast_view(mask),
                          {mask.size(0), mask.size(1), mask.size(2), mask.size(3)},
                          tiles.data_ptr<uint8_t>(), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return tiles;
}

MaskTiles mask_tiles_view(const at::Tensor& tiles) {
  if (!tiles.defined() || tiles.numel() == 0) return {};
  const auto stride = [&](int64_t d) { return tiles.size(d) == 1 ? 0 : tiles.stride(d); };
  return {tiles.const_data_ptr<uint8_t>(), stride(0), stride(1), stride(2), stride(3)};
}

void forward_sm80(const AttentionCall& call, ForwardTensors& t) {
  if (call.has_empty_dimension()) return forward_aten(call, t);
  const Inputs in(call, t.mask_tiles);
  sm80::AttnFwdParams p{call.params};
  in.set(call, p);
  if (p.drops_all()) p.dropout_threshold = 0;  // only LSE is left to compute
  const SplitStates states(
      sm80::attn_fwd_splits(p, in.device), t.out, !call.packed(),
      [&](const at::Tensor& out) { return call.view(out); },
      [&](const at::Tensor& lse) { return call.lse_view(lse); });
  p.splits = states.params;
  sm80::launch_attn_fwd(p, in.device, in.stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  if (p.splits.count > 1) {
    at::Tensor out;
    std::tie(out, t.lse) = states.merged();
    t.out.copy_(out);
  }
  if (call.params.drops_all()) t.out.zero_();
}

void backward_sm80(const AttentionCall& call, BackwardTensors& t) {
  if (call.has_empty_dimension()) return backward_aten(call, t);
  t.grad_out = with_unit_columns(t.grad_out);
  t.saved.out = with_unit_columns(t.saved.out);
  const Inputs in(call, t.saved.mask_tiles);
  sm80::AttnBwdParams p{backward_params(call, t)};
  in.set(call, p);
  p.deterministic = t.deterministic;

  const auto options = in.q.options().dtype(at::kFloat);
  const int64_t heads = sm80::padded_heads(p), rows = sm80::padded_rows(p);
  // The kernels count them in 32 bits.
  TORCH_CHECK(heads * rows <= UINT32_MAX, "flashbpt: the backward takes up to ", UINT32_MAX,
              " rows of query of all heads, each head's rounded up to a multiple of ",
              sm80::kRowPad, "; got ", heads * rows);
  const at::Tensor row_values = at::empty({p.lse_lo ? 3 : 2, heads * rows}, options);
  p.row_lse = row_values.data_ptr<float>();
  p.row_delta = p.row_lse + heads * rows;
  if (p.lse_lo) p.row_lse_lo = p.row_delta + heads * rows;
  if (t.need_dsinks) {
    t.dsinks = zero_parts(call, rows / sm80::kRowPad, p.packed() ? 1 : p.batch, p.dsinks);
  }
  at::Tensor dq_acc, dq_turns;
  if (t.dq.defined()) {
    dq_acc = at::empty({heads, rows / 16, sm80::dq_acc_pieces(p.dim), 128}, options);
    p.dq_acc = dq_acc.data_ptr<float>();
    if (p.deterministic) {
      dq_turns = at::empty({heads, rows / sm80::kTurnRows}, options.dtype(at::kInt));
      p.dq_turns = dq_turns.data_ptr<int32_t>();
    }
  }
  sm80::launch_attn_bwd_prepare(p, in.stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();

  if (t.dq.defined() || t.dk.defined() || t.dv.defined()) {
    p.q_splits = p.deterministic ? 1 : sm80::attn_bwd_q_splits(p, in.device);
    p.accumulate = t.accumulate || p.q_splits > 1;
    std::optional<Accumulator> dk, dv;
    if (p.accumulate) {
      dk.emplace(call, t.dk, 1, t.accumulate);
      dv.emplace(call, t.dv, 1, t.accumulate);
      p.dk = dk->view(call);
      p.dv = dv->view(call);
    } else {
      if (t.dk.defined()) p.dk = call.view(t.dk);
      if (t.dv.defined()) p.dv = call.view(t.dv);
    }
    sm80::launch_attn_bwd(p, in.device, in.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (t.dq.defined()) {
      sm80::launch_attn_bwd_finish(p, in.stream);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    if (p.accumulate) {
      dk->finish();
      dv->finish();
    }
  }

  if (t.need_dalibi) {
    const int64_t parts = sm80::attn_bwd_terms_partials(p, in.device);
    t.dalibi = zero_parts(call, parts, p.batch, p.dalibi);
  }
  if (t.dmask.defined() || t.need_dalibi) {
    sm80::launch_attn_bwd_terms(p, in.device, in.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

#else

// A build without the CUDA part refuses every call of the backend.
const char* refusal_sm80(const AttentionCall&) {
  return "this build has no CUDA part";
}
std::string kernel_sm80(const AttentionCall&, bool) {
  return {};
}
void forward_sm80(const AttentionCall&, ForwardTensors&) {}
void backward_sm80(const AttentionCall&, BackwardTensors&) {}
at::Tensor mask_tiles(const at::Tensor& mask) {
  return mask.new_empty({0}, mask.options().dtype(at::kByte));
}

#endif

}  // namespace flashbpt
