// Times of the kernels between a block's matrix products beside a copy of as many bytes.
#pragma once

#include "../../csrc/sm80/activation/launch.h"
#include "../../csrc/sm80/add_partials/launch.h"
#include "../../csrc/sm80/rope/launch.h"
#include "../../csrc/sm80/row_dropout/launch.h"
#include "../../csrc/sm80/row_norm/launch.h"
#include "block_rows_checks.h"

constexpr int kTimedSets = 2;  // of buffers, each several times the L2 cache

__global__ void copy_kernel(uint4* to, const uint4* from, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) to[i] = from[i];
}

// Bytes a second of the faster of a copy kernel and cudaMemcpyAsync that read and write as many.
inline double copy_rate(double bytes) {
  const int64_t count = static_cast<int64_t>(bytes) / 32;
  Arena arena;
  uint4 *to[kTimedSets], *from[kTimedSets];
  for (int i = 0; i < kTimedSets; ++i) {
    to[i] = arena.take<uint4>(count * 16);
    from[i] = arena.take<uint4>(count * 16);
  }
  const double kernel = median_graph_seconds(kTimedSets, [&](int i, cudaStream_t stream) {
    copy_kernel<<<(count + 255) / 256, 256, 0, stream>>>(to[i], from[i], count);
  });
  const double memcpy = median_graph_seconds(kTimedSets, [&](int i, cudaStream_t stream) {
    cudaMemcpyAsync(to[i], from[i], count * 16, cudaMemcpyDeviceToDevice, stream);
  });
  return bytes / std::min(kernel, memcpy);
}

// launch(set, stream) moves `bytes`.
template <typename Launch>
void time_beside_copy(const char* what, double bytes, Launch launch) {
  const double rate = bytes / median_graph_seconds(kTimedSets, launch);
  check_cuda(cudaGetLastError(), what);
  const double copy = copy_rate(bytes);
  std::printf("%-58s %8.1f us  %6.0f GB/s  copy %6.0f GB/s  ratio %.3f\n", what, bytes / rate * 1e6,
              rate * 1e-9, copy * 1e-9, rate / copy);
}

// Tensors of `elements` bf16 elements, a few a set.
struct TimedTensors {
  Arena arena;
  std::vector<void*> tensors[kTimedSets];
  TimedTensors(int count, int64_t elements) {
    for (auto& set : tensors)
      for (int i = 0; i < count; ++i) set.push_back(arena.take(elements * 2));
  }
};

inline void time_norms(int64_t rows, int width) {
  const double bytes = 2.0 * rows * width;
  const TimedTensors t(4, rows * width);
  Arena arena;
  void *const weight = arena.take(width * 2), *const bias = arena.take(width * 2);
  float* const totals[] = {arena.take<float>(width * 4), arena.take<float>(width * 4)};
  for (const bool centred : {false, true}) {
    const auto params = [&](int set) {
      RowNormBackwardParams p;
      p.x = t.tensors[set][0], p.out = t.tensors[set][1], p.dy = t.tensors[set][2];
      p.residual = t.tensors[set][3], p.weight = weight, p.bias = centred ? bias : nullptr;
      p.rows = rows, p.width = width, p.eps = 1e-5f, p.centred = centred;
      p.dtype = flashbpt::DataType::kBFloat16;
      return p;
    };
    time_beside_copy(centred ? "LayerNorm" : "RMSNorm", 2 * bytes,
                     [&](int set, cudaStream_t s) { launch_row_norm(params(set), s); });
    const int blocks = row_norm_blocks(params(0), multiprocessors());
    float* const partials[] = {arena.take<float>(int64_t{blocks} * width * 4),
                               arena.take<float>(int64_t{blocks} * width * 4)};
    for (const bool gradients : {false, true}) {
      const std::string what = std::string(centred ? "LayerNorm" : "RMSNorm") +
                               " backward, residual" + (gradients ? ", weight gradients" : "");
      time_beside_copy(what.c_str(), 4 * bytes, [&](int set, cudaStream_t s) {
        RowNormBackwardParams p = params(set);
        p.blocks = blocks;
        if (gradients) p.weight_partials = partials[0];
        if (gradients && centred) p.bias_partials = partials[1];
        launch_row_norm_backward(p, s);
        if (gradients)
          launch_add_partials({{partials[0], partials[1]},
                               {totals[0], centred ? totals[1] : nullptr},
                               blocks,
                               width},
                              s);
      });
    }
  }
}

inline void time_rope(int64_t rows, int heads, int dim) {
  const int64_t elements = rows * heads * dim;
  const TimedTensors t(3, elements);
  Arena arena;
  void* const weight = arena.take(dim * 2);
  float *const cos = arena.take<float>(rows * dim * 2), *const sin =
                                                            arena.take<float>(rows * dim * 2);
  float* const total = arena.take<float>(dim * 4);
  float* const wide[kTimedSets] = {arena.take<float>(elements * 4),
                                   arena.take<float>(elements * 4)};
  const auto params = [&](int set, bool norm) {
    const auto view = [&](void* data) {
      return flashbpt::TensorView{data, flashbpt::DataType::kBFloat16, 0,
                                  dim,  int64_t{heads} * dim,          1};
    };
    RopeBackwardParams p;
    p.in = view(t.tensors[set][0]), p.out = view(t.tensors[set][1]), p.x = view(t.tensors[set][2]);
    p.weight = norm ? weight : nullptr, p.eps = 1e-5f, p.cos = cos, p.sin = sin, p.pairs = dim / 2;
    p.rows = rows, p.heads = heads, p.dim = dim;
    return p;
  };
  const double angles = 4.0 * rows * dim, bytes = 2.0 * elements;
  for (const bool norm : {false, true}) {
    time_beside_copy(norm ? "rope, norm of heads" : "rope", 2 * bytes + angles,
                     [&](int set, cudaStream_t s) { launch_rope(params(set, norm), s); });
    time_beside_copy(norm ? "rope in place, norm of heads" : "rope in place", 2 * bytes + angles,
                     [&](int set, cudaStream_t s) {
                       RopeParams p = params(set, norm);
                       p.out = p.in;
                       launch_rope(p, s);
                     });
  }
  const int blocks = rope_blocks(params(0, true), multiprocessors());
  float* const partials = arena.take<float>(int64_t{blocks} * dim * 4);
  for (const bool fp32 : {false, true})
    for (const bool norm : {false, true}) {
      const std::string what = std::string("rope backward") + (fp32 ? ", dy fp32" : "") +
                               (norm ? ", norm of heads, weight gradient" : "");
      time_beside_copy(what.c_str(), (fp32 ? 3 : 2) * bytes + norm * bytes + angles,
                       [&](int set, cudaStream_t s) {
                         RopeBackwardParams p = params(set, norm);
                         p.blocks = blocks;
                         if (norm) p.weight_partials = partials;
                         if (fp32) p.in.data = wide[set];
                         if (fp32) p.in.dtype = flashbpt::DataType::kFloat32;
                         launch_rope_backward(p, s);
                         if (norm) launch_add_partials({{partials}, {total}, blocks, dim}, s);
                       });
    }
}

inline void time_activations(int64_t rows, int64_t width) {
  const TimedTensors t(3, rows * width);
  const char* const names[] = {"silu", "gelu", "gelu_tanh", "relu"};
  for (const auto f :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu})
    for (const bool gated : {true, false}) {
      if (!gated && f == Activation::kSilu) continue;
      const auto params = [&](int set) {
        return ActivationParams{gated ? t.tensors[set][0] : nullptr,
                                t.tensors[set][1],
                                t.tensors[set][2],
                                rows * width,
                                f,
                                flashbpt::DataType::kBFloat16};
      };
      const std::string what = std::string(names[static_cast<int>(f)]) + (gated ? " gated" : "");
      const double bytes = 2.0 * rows * width * (gated ? 3 : 2);
      time_beside_copy(what.c_str(), bytes,
                       [&](int set, cudaStream_t s) { launch_activation_forward(params(set), s); });
      time_beside_copy((what + " backward").c_str(), 2 * bytes, [&](int set, cudaStream_t s) {
        launch_activation_backward(params(set), s);
      });
    }
}

inline void time_dropout(int64_t rows, int width) {
  const double bytes = 2.0 * rows * width;
  const TimedTensors t(3, rows * width);
  Arena arena;
  void* const bias = arena.take(width * 2);
  auto* const rng_state = arena.take<int64_t>(16);
  const auto params = [&](int set, bool drops, bool backward) {
    RowDropoutParams p;
    p.x = t.tensors[set][0], p.out = t.tensors[set][1];
    if (!backward) p.residual = t.tensors[set][2], p.bias = bias;
    if (drops) p.rng_state = rng_state, p.threshold = uint64_t{1} << 29, p.scale = 8.0f / 7;
    p.rows = rows, p.width = width, p.dtype = flashbpt::DataType::kBFloat16;
    return p;
  };
  time_beside_copy("residual, bias", 3 * bytes, [&](int set, cudaStream_t s) {
    launch_row_dropout(params(set, false, false), s);
  });
  time_beside_copy("residual, bias, dropout", 3 * bytes, [&](int set, cudaStream_t s) {
    launch_row_dropout(params(set, true, false), s);
  });
  time_beside_copy("dropout backward", 2 * bytes, [&](int set, cudaStream_t s) {
    launch_row_dropout(params(set, true, true), s);
  });
}

inline void time_all() {
  std::printf("\nbf16, 16384 x 4096\n");
  time_norms(16384, 4096);
  time_dropout(16384, 4096);
  std::printf("\nbf16, 16384 x 32 heads x 128\n");
  time_rope(16384, 32, 128);
  std::printf("\nbf16, 16384 x 11008\n");
  time_activations(16384, 11008);
}
