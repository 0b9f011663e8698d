// Host side of the sm80 kernels between a block's matrix products: params, workspaces, launches.
#include "block_elementwise_backends.h"

#include "check.h"

#ifdef FLASHBPT_WITH_CUDA
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "device_limits.h"
#include "sm80/activation/launch.h"
#include "sm80/add_partials/launch.h"
#include "sm80/rope/config.h"
#include "sm80/rope/launch.h"
#include "sm80/row_dropout/launch.h"
#include "sm80/row_norm/launch.h"
#endif

namespace flashbpt {

#ifdef FLASHBPT_WITH_CUDA

namespace sm80 {
namespace {

// A contiguous tensor of `elements` elements of `like`'s type; null where undefined.
void* elements_of(const char* name, const at::Tensor& t, const at::Tensor& like, int64_t elements) {
  if (!t.defined()) return nullptr;
  TORCH_CHECK(t.scalar_type() == like.scalar_type() && t.device() == like.device() &&
                  t.is_contiguous() && t.numel() == elements,
              "flashbpt: ", name, " has to be contiguous, of ", like.scalar_type(), ", on ",
              like.device(), " and of ", elements, " elements; got ", t.scalar_type(), " on ",
              t.device(), " of ", t.sizes(), ", strides ", t.strides());
  return t.data_ptr();
}

void* rows_of(const char* name, const at::Tensor& t, const at::Tensor& like) {
  return elements_of(name, t, like, like.numel());
}

int width_of(const at::Tensor& rows) {
  TORCH_CHECK(rows.size(-1) <= INT32_MAX, "flashbpt: a row has ", rows.size(-1),
              " columns; kernels take up to 2^31 - 1");
  return static_cast<int>(rows.size(-1));
}

// Gradients of up to two weights [width], summed by the blocks of a kernel apart and added to what
// is there.
class PartialSums {
 public:
  PartialSums(const at::Tensor& like, int64_t blocks, int width,
              std::initializer_list<at::Tensor> totals) {
    sums_.count = blocks;
    sums_.width = width;
    int64_t needed = 0;
    for (const at::Tensor& total : totals) needed += total.defined();
    if (needed == 0) return;
    const at::TensorOptions options = like.options().dtype(at::kFloat);
    // Rows of partial sums follow each other: those of the second begin at a multiple of 16 bytes.
    const int64_t size = (blocks * width + 3) / 4 * 4;
    workspace_ = at::empty({needed * size}, options);
    float* partials = workspace_.data_ptr<float>();
    int i = 0;
    for (const at::Tensor& total : totals) {
      if (total.defined()) {
        sums_.totals[i] =
            static_cast<float*>(elements_of("a weight's gradient", total, workspace_, width));
        sums_.partials[i] = partials;
        partials += size;
      }
      ++i;
    }
  }

  float* partials(int i) const { return const_cast<float*>(sums_.partials[i]); }

  void add(cudaStream_t stream) const {
    launch_add_partials(sums_, stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  AddPartialsParams sums_;
  at::Tensor workspace_;
};

template <typename Params>
Params norm_params(const at::Tensor& x, const Norm& norm, const at::Tensor& out) {
  Params p;
  p.width = width_of(x);
  p.x = rows_of("x", x, x);
  p.out = rows_of("out", out, x);
  p.weight = elements_of("a norm's weight", norm.weight, x, p.width);
  p.bias = elements_of("a norm's bias", norm.bias, x, p.width);
  p.rows = x.numel() / p.width;
  p.eps = static_cast<float>(norm.eps);
  p.centred = norm.kind == NormKind::kLayer;
  p.dtype = data_type(x.scalar_type());
  return p;
}

TensorView heads_view(const char* name, const at::Tensor& t, const at::Tensor& out) {
  TORCH_CHECK(
      t.dim() == 3 && t.sizes() == out.sizes() && has_unit_columns(t) && t.device() == out.device(),
      "flashbpt: ", name,
      " has to be [rows, heads, dim] as the output, on its device and "
      "with unit columns; got ",
      t.sizes(), ", strides ", t.strides(), " on ", t.device(), " for ", out.sizes(), " on ",
      out.device());
  const DataType dtype = data_type(t.scalar_type());
  TORCH_CHECK(t.scalar_type() == out.scalar_type() || dtype == DataType::kFloat32,
              "flashbpt: ", name, " has to be of float32 or ", out.scalar_type(), "; got ",
              t.scalar_type());
  return {t.data_ptr(), dtype, 0, t.stride(1), t.stride(0), 1};
}

template <typename Params>
Params rope_params(const at::Tensor& in, const Norm& norm, const Rope& rope,
                   const at::Tensor& out) {
  Params p;
  p.out = heads_view("out", out, out);
  p.in = heads_view("x or dy", in, out);
  p.rows = out.size(0);
  p.heads = static_cast<int>(out.size(1));
  p.dim = width_of(out);
  p.weight = elements_of("the heads' norm", norm.weight, out, p.dim);
  p.eps = static_cast<float>(norm.eps);
  TORCH_CHECK(p.weight == nullptr || p.dim <= kRopeMaxNormDim,
              "flashbpt: heads with a norm are up to ", kRopeMaxNormDim, " wide; got ", p.dim);
  if (rope.cos.defined()) {
    const at::Tensor& cos = rope.cos;
    TORCH_CHECK(cos.scalar_type() == at::kFloat && cos.dim() == 2 && cos.size(0) == p.rows &&
                    2 * cos.size(1) <= p.dim,
                "flashbpt: cos has to be float32 [rows, pairs] with 2 pairs <= dim; got ",
                cos.scalar_type(), " ", cos.sizes(), " for heads ", out.sizes());
    p.pairs = static_cast<int>(cos.size(1));
    p.cos = static_cast<const float*>(rows_of("cos", cos, cos));
    p.sin = static_cast<const float*>(rows_of("sin", rope.sin, cos));
    p.interleaved = rope.interleaved;
  }
  return p;
}

RowDropoutParams dropout_params(const at::Tensor& x, const RowDropout& dropout,
                                const at::Tensor& out) {
  RowDropoutParams p;
  p.width = width_of(x);
  p.x = rows_of("x", x, x);
  p.out = rows_of("out", out, x);
  p.rows = x.numel() / p.width;
  p.dtype = data_type(x.scalar_type());
  p.rng_state = dropout.rng_state;
  p.site = static_cast<uint32_t>(dropout.site);
  p.token = static_cast<uint32_t>(dropout.token);
  p.threshold = dropout.threshold;
  p.scale = static_cast<float>(dropout.scale);
  return p;
}

ActivationParams activation_params(const at::Tensor& gate, const at::Tensor& up,
                                   Activation activation, const at::Tensor& out) {
  return {rows_of("gate", gate, up),
          rows_of("up", up, up),
          rows_of("out or da", out, up),
          up.numel(),
          activation,
          data_type(up.scalar_type())};
}

void norm_forward(const at::Tensor& x, const Norm& norm, const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(x.device());
  launch_row_norm(norm_params<RowNormParams>(x, norm, out), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void norm_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm,
                   const at::Tensor& residual, const at::Tensor& dx, const NormGradients& grads) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto p = norm_params<RowNormBackwardParams>(x, norm, dx);
  p.dy = rows_of("dy", dy, x);
  p.residual = rows_of("residual", residual, x);
  p.blocks = row_norm_blocks(p, device_limits(x).multiprocessors);
  const PartialSums sums(x, p.blocks, p.width, {grads.weight, grads.bias});
  p.weight_partials = sums.partials(0);
  p.bias_partials = sums.partials(1);
  launch_row_norm_backward(p, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  sums.add(stream);
}

void rope_forward(const at::Tensor& x, const Norm& norm, const Rope& rope, const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(x.device());
  TORCH_CHECK(x.scalar_type() == out.scalar_type(), "flashbpt: heads are of ", x.scalar_type(),
              " and their output of ", out.scalar_type(), "; both have to be the same");
  launch_rope(rope_params<RopeParams>(x, norm, rope, out), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void rope_backward(const at::Tensor& dy, const at::Tensor& x, const Norm& norm, const Rope& rope,
                   const at::Tensor& dx, const NormGradients& grads) {
  const c10::cuda::CUDAGuard guard(dx.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto p = rope_params<RopeBackwardParams>(dy, norm, rope, dx);
  if (p.weight != nullptr) {
    TORCH_CHECK(x.defined() && x.scalar_type() == dx.scalar_type(),
                "flashbpt: the gradient of heads with a norm needs them, of ", dx.scalar_type());
    p.x = heads_view("x", x, dx);
  }
  TORCH_CHECK(p.weight != nullptr || !grads.weight.defined(),
              "flashbpt: heads without a norm have no gradient of its weight");
  p.blocks = rope_blocks(p, device_limits(dx).multiprocessors);
  const PartialSums sums(dx, p.blocks, p.dim, {grads.weight});
  p.weight_partials = sums.partials(0);
  launch_rope_backward(p, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  sums.add(stream);
}

void activation_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation,
                        const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(up.device());
  launch_activation_forward(activation_params(gate, up, activation, out),
                            c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void activation_backward(const at::Tensor& da, const at::Tensor& gate, const at::Tensor& up,
                         Activation activation) {
  const c10::cuda::CUDAGuard guard(up.device());
  launch_activation_backward(activation_params(gate, up, activation, da),
                             c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void residual_forward(const at::Tensor& x, const at::Tensor& bias, const RowDropout& dropout,
                      const at::Tensor& residual, const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(x.device());
  RowDropoutParams p = dropout_params(x, dropout, out);
  p.bias = elements_of("a bias", bias, x, p.width);
  p.residual = rows_of("residual", residual, x);
  launch_row_dropout(p, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void dropout_backward(const at::Tensor& dy, const RowDropout& dropout, const at::Tensor& dx) {
  const c10::cuda::CUDAGuard guard(dy.device());
  launch_row_dropout(dropout_params(dy, dropout, dx), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace sm80

const RowBackend kSm80Rows{sm80::norm_forward,       sm80::norm_backward,
                           sm80::rope_forward,       sm80::rope_backward,
                           sm80::activation_forward, sm80::activation_backward,
                           sm80::residual_forward,   sm80::dropout_backward};

#else

const RowBackend kSm80Rows{};

#endif

}  // namespace flashbpt
