// Host side of merge_attention_states: check, fold the leading dimensions, launch.
#include "merge_states.h"

#include <array>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "check.h"
#include "cpu/merge_states.h"
#include "merge_states_params.h"

#ifdef FLASHBPT_WITH_CUDA
#include <algorithm>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "sm80/merge_states/launch.h"
#endif

namespace flashbpt {
namespace {

constexpr int64_t kVectorBytes = 16;

void check_states(at::TensorList outs, at::TensorList lses) {
  TORCH_CHECK(!outs.empty(), "merge_attention_states: outs is empty; at least one state is needed");
  TORCH_CHECK(outs.size() == lses.size(), "merge_attention_states: outs and lses must have the ",
              "same length, but got ", outs.size(), " outs and ", lses.size(), " lses");
  const at::Tensor& first = outs[0];
  TORCH_CHECK(first.dim() >= 1, "merge_attention_states: outs must have at least one dimension ",
              "(..., D), but outs[0] has shape ", first.sizes());
  TORCH_CHECK(is_attention_dtype(first.scalar_type()), "merge_attention_states: outs must be ",
              "float32, bfloat16, float16 or float64, but outs[0] is ", first.scalar_type());
  TORCH_CHECK(first.is_cpu() || first.is_cuda(), "merge_attention_states: outs must be on the CPU ",
              "or a CUDA device, but outs[0] is on ", first.device());
  const at::ScalarType lse_dtype = accumulation_dtype(first.scalar_type());
  const at::IntArrayRef lse_sizes = first.sizes().slice(0, first.dim() - 1);
  for (size_t i = 0; i < outs.size(); ++i) {
    const at::Tensor& out = outs[i];
    const at::Tensor& lse = lses[i];
    TORCH_CHECK(out.sizes() == first.sizes(), "merge_attention_states: all outs must have one ",
                "shape, but outs[", i, "] is ", out.sizes(), " and outs[0] is ", first.sizes());
    TORCH_CHECK(out.scalar_type() == first.scalar_type(), "merge_attention_states: all outs must ",
                "have one dtype, but outs[", i, "] is ", out.scalar_type(), " and outs[0] is ",
                first.scalar_type());
    TORCH_CHECK(lse.sizes() == lse_sizes, "merge_attention_states: lses must have the shape of ",
                "outs without the last dimension, ", lse_sizes, ", but lses[", i, "] is ",
                lse.sizes());
    TORCH_CHECK(lse.scalar_type() == lse_dtype, "merge_attention_states: lses must be ", lse_dtype,
                " where outs are ", first.scalar_type(), ", but lses[", i, "] is ",
                lse.scalar_type());
    TORCH_CHECK(out.device() == first.device() && lse.device() == first.device(),
                "merge_attention_states: all outs and lses must be on one device, but outs[0] ",
                "is on ", first.device(), ", outs[", i, "] on ", out.device(), " and lses[", i,
                "] on ", lse.device());
    TORCH_CHECK(out.layout() == at::kStrided && lse.layout() == at::kStrided,
                "merge_attention_states: outs and lses must be strided tensors, but outs[", i,
                "] is ", out.layout(), " and lses[", i, "] is ", lse.layout());
  }
}

// A dimension of the rows: its size, and the strides of all outs, then of all lses.
struct LeadingDim {
  int64_t size;
  std::vector<int64_t> strides;
};

// Neighbours that every tensor walks through with one stride become one dimension.
std::vector<LeadingDim> fold_leading_dims(const std::vector<at::Tensor>& outs,
                                          const std::vector<at::Tensor>& lses) {
  std::vector<LeadingDim> folded;
  for (int64_t d = 0; d < outs[0].dim() - 1; ++d) {
    if (outs[0].size(d) == 1) continue;
    LeadingDim dim{outs[0].size(d), {}};
    for (const at::Tensor& t : outs) dim.strides.push_back(t.stride(d));
    for (const at::Tensor& t : lses) dim.strides.push_back(t.stride(d));
    bool one_walk = !folded.empty();
    for (size_t i = 0; one_walk && i < dim.strides.size(); ++i)
      one_walk = folded.back().strides[i] == dim.strides[i] * dim.size;
    if (one_walk) {
      dim.size *= folded.back().size;
      folded.pop_back();
    }
    folded.push_back(std::move(dim));
  }
  return folded;
}

// The states as the kernels read them, with the tensors that hold their memory: the arguments, or
// copies of those that are not walked row by row.
struct MergeStates {
  std::vector<at::Tensor> outs;
  std::vector<at::Tensor> lses;
  MergeShape shape;
  std::vector<MergeState> states;

  MergeStates(at::TensorList outs_in, at::TensorList lses_in)
      : outs(outs_in.vec()), lses(lses_in.vec()) {
    const int64_t rank = outs[0].dim();
    shape.dtype = data_type(outs[0].scalar_type());
    shape.dim = outs[0].size(rank - 1);
    for (at::Tensor& t : outs)
      if (shape.dim > 1 && t.stride(rank - 1) != 1) t = t.contiguous();
    std::vector<LeadingDim> dims = fold_leading_dims(outs, lses);
    if (dims.size() > kMergeLeadingDims) {
      for (at::Tensor& t : outs) t = t.contiguous();
      for (at::Tensor& t : lses) t = t.contiguous();
      dims = fold_leading_dims(outs, lses);
    }
    states.resize(outs.size());
    for (size_t i = 0; i < states.size(); ++i) {
      states[i].out = outs[i].const_data_ptr();
      states[i].lse = lses[i].const_data_ptr();
    }
    const size_t unused = kMergeLeadingDims - dims.size();
    for (size_t d = 0; d < dims.size(); ++d) {
      shape.size[unused + d] = dims[d].size;
      for (size_t i = 0; i < states.size(); ++i) {
        states[i].out_stride[unused + d] = dims[d].strides[i];
        states[i].lse_stride[unused + d] = dims[d].strides[states.size() + i];
      }
    }
    shape.rows = shape.size[0] * shape.size[1] * shape.size[2];
  }
};

#ifdef FLASHBPT_WITH_CUDA
bool rows_are_aligned(const MergeStates& in, int64_t element_bytes) {
  bool aligned = in.shape.dim * element_bytes % kVectorBytes == 0;
  for (const MergeState& state : in.states) {
    aligned = aligned && reinterpret_cast<uintptr_t>(state.out) % kVectorBytes == 0;
    for (const int64_t stride : state.out_stride)
      aligned = aligned && stride * element_bytes % kVectorBytes == 0;
  }
  return aligned;
}

void merge_states_cuda(const MergeStates& in, const at::Tensor& out, const at::Tensor& lse) {
  const c10::cuda::CUDAGuard device_guard(out.device());
  TORCH_CHECK(in.shape.dim <= std::numeric_limits<int32_t>::max(),
              "merge_attention_states: D must ", "be below 2^31 on CUDA, but outs are (..., ",
              in.shape.dim, ")");
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int64_t num_states = static_cast<int64_t>(in.states.size());
  sm80::MergeStatesParams params;
  params.shape = in.shape;
  params.vectorised = rows_are_aligned(in, out.element_size());
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr();

  at::Tensor sums;
  std::array<at::Tensor, 2> max_sum;
  if (num_states > sm80::kMaxMergeStates) {
    sums = at::empty({in.shape.rows, in.shape.dim}, lse.options());
    for (at::Tensor& t : max_sum) t = at::empty({in.shape.rows, 2}, lse.options());
    params.carry.sums = sums.mutable_data_ptr();
  }
  for (int64_t begin = 0, group = 0; begin < num_states; begin += sm80::kMaxMergeStates, ++group) {
    const int64_t end = std::min<int64_t>(begin + sm80::kMaxMergeStates, num_states);
    std::copy(in.states.begin() + begin, in.states.begin() + end, params.states);
    params.num_states = static_cast<int>(end - begin);
    params.carry.max_sum_in = begin == 0 ? nullptr : max_sum[(group + 1) % 2].const_data_ptr();
    params.carry.max_sum_out = end == num_states ? nullptr : max_sum[group % 2].mutable_data_ptr();
    sm80::launch_merge_states(params, stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}
#endif

}  // namespace

std::tuple<at::Tensor, at::Tensor> merge_attention_states(at::TensorList outs,
                                                          at::TensorList lses) {
  check_states(outs, lses);
  at::Tensor out = at::empty(outs[0].sizes(), outs[0].options());
  at::Tensor lse = at::empty(lses[0].sizes(), lses[0].options());
  if (lse.numel() == 0) return {out, lse};
  if (out.is_cpu()) {
    const MergeStates in(outs, lses);
    cpu::merge_states(in.shape, in.states.data(), static_cast<int64_t>(in.states.size()),
                      out.mutable_data_ptr(), lse.mutable_data_ptr());
    return {out, lse};
  }
#ifdef FLASHBPT_WITH_CUDA
  merge_states_cuda(MergeStates(outs, lses), out, lse);
  return {out, lse};
#else
  TORCH_CHECK(false, "merge_attention_states: outs are on ", outs[0].device(), ", but this build ",
              "of flashbpt has no CUDA part; build it where a CUDA toolkit is found");
#endif
}

}  // namespace flashbpt
