// out = f(gate) up        dgate = dout up f'(gate)        dup = dout f(gate)
// out = f(up)             dup = dout f'(up)               where there is no gate
//
// Who does what: a thread takes vectors of 16 bytes, the same of each tensor. The backward reads
// all of them before it writes any, and what it writes lies where it read: out, which a backward of
// a matrix product wants, is computed again on the way.
//
// Barriers: none.
//
// docs/block_rows.md
#pragma once

#include "../../ptx/grid.h"
#include "../../tile/vector.h"
#include "config.h"
#include "functions.h"
#include "launch.h"

namespace flashbpt::sm80 {

// use(f) with the activation f: one branch a thread, not one an element.
template <typename T, typename Use>
__device__ void with_function(Activation function, Use use) {
  switch (function) {
    case Activation::kSilu:
      return use([](float x) { return silu<T>(x); });
    case Activation::kGelu:
      return use([](float x) { return gelu(x); });
    case Activation::kGeluTanh:
      return use([](float x) { return gelu_tanh<T>(x); });
    case Activation::kRelu:
      return use([](float x) { return relu(x); });
  }
}

// kPieces vectors of each tensor, `step` elements apart.
template <typename T, int kWidth, int kPieces>
struct ActivationPieces {
  using Vector = tile::Vector<T, kWidth>;

  const ActivationParams& p;
  int64_t first, step;

  __device__ void load(Vector (&to)[kPieces], const void* data) const {
    const T* const from = static_cast<const T*>(data) + first;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) to[i] = *reinterpret_cast<const Vector*>(from + i * step);
  }
  __device__ void store(void* data, int piece, const float* x) const {
    T* const to = static_cast<T*>(data) + first + piece * step;
    *reinterpret_cast<Vector*>(to) = Vector::round(x);
  }

  template <bool kGated>
  __device__ void forward() const {
    Vector gate[kPieces], up[kPieces];
    if (kGated) load(gate, p.gate);
    load(up, p.up);
    with_function<T>(p.function, [&](auto f) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        float out[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          out[j] = kGated ? f(gate[i].get(j)).value * up[i].get(j) : f(up[i].get(j)).value;
        store(p.out, i, out);
      }
    });
  }

  template <bool kGated>
  __device__ void backward() const {
    Vector grad[kPieces], gate[kPieces], up[kPieces];
    load(grad, p.out);
    load(up, p.up);
    if (kGated) load(gate, p.gate);
    with_function<T>(p.function, [&](auto f) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        float out[kWidth], grad_gate[kWidth], grad_up[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const Activated a = f((kGated ? gate : up)[i].get(j));
          const float factor = kGated ? up[i].get(j) : 1.0f;
          out[j] = a.value * factor;
          grad_gate[j] = grad[i].get(j) * factor * a.slope;
          grad_up[j] = grad[i].get(j) * a.value;
        }
        store(p.out, i, out);
        store(p.up, i, kGated ? grad_up : grad_gate);
        if (kGated) store(p.gate, i, grad_gate);
      }
    });
  }
};

// use(pieces) for the elements of this block: as vectors, or one by one where they are not aligned
// or the last block is not full.
template <typename T, const ActivationConfig& kConfig, typename Use>
__device__ void for_each_pieces(const ActivationParams& p, Use use) {
  constexpr int kWidth = kConfig.vector_bytes / sizeof(T), kPieces = kConfig.thread_vectors;
  constexpr int kThreads = kConfig.block_threads, kStep = kThreads * kWidth;
  const int64_t first = int64_t{blockIdx.x} * kStep * kPieces, end = first + kStep * kPieces;
  if (p.vectorised && end <= p.count) {
    use(ActivationPieces<T, kWidth, kPieces>{p, first + threadIdx.x * kWidth, kStep});
  } else {
    const int64_t last = end < p.count ? end : p.count;
#pragma unroll 1
    for (int64_t i = first + threadIdx.x; i < last; i += kThreads)
      use(ActivationPieces<T, 1, 1>{p, i, 0});
  }
}

template <typename T>
__global__ void __launch_bounds__(kActivationForwardConfig.block_threads,
                                  kActivationForwardConfig.min_blocks)
    activation_forward_kernel(const __grid_constant__ ActivationParams p) {
  ptx::follow_earlier_grids();
  for_each_pieces<T, kActivationForwardConfig>(p, [&](const auto& pieces) {
    if (p.gate != nullptr)
      pieces.template forward<true>();
    else
      pieces.template forward<false>();
  });
}

template <typename T>
__global__ void __launch_bounds__(kActivationBackwardConfig.block_threads,
                                  kActivationBackwardConfig.min_blocks)
    activation_backward_kernel(const __grid_constant__ ActivationParams p) {
  ptx::follow_earlier_grids();
  for_each_pieces<T, kActivationBackwardConfig>(p, [&](const auto& pieces) {
    if (p.gate != nullptr)
      pieces.template backward<true>();
    else
      pieces.template backward<false>();
  });
}

}  // namespace flashbpt::sm80
