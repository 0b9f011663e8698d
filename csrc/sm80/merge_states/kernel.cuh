// out = sum_i w_i out_i, w_i = exp(lse_i - lse), lse = log sum_i exp(lse_i)
//
// Who does what: threads along y own rows, threads along x share the columns of a row, a few
// vectors (16 bytes) each, so that addresses and weights, which all threads of a row compute alike,
// are paid once for several vectors. A thread walks over the states, a few loads ahead, and keeps
// the largest LSE m, the sum l of exp(lse_i - m), and its columns of the sum of exp(lse_i - m)
// out_i: the online softmax, with states for blocks of keys. The thread with column 0 writes lse.
//
// Barriers: none. No thread reads what another one writes; nothing is shared.
//
// docs/merge_states.md
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "config.h"
#include "launch.h"

namespace flashbpt::sm80 {

// An element type: its accumulation type, and conversions of one element and, where two share a
// 32-bit register, of a pair.
template <typename T>
struct MergeElement;
template <>
struct MergeElement<__nv_bfloat16> {
  using Acc = float;
  static constexpr DataType kDtype = DataType::kBFloat16;
  static __device__ float load(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ float load_low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ float load_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
  static __device__ __nv_bfloat16 store(float x) { return __float2bfloat16_rn(x); }
  static __device__ uint32_t store_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
};
template <>
struct MergeElement<__half> {
  using Acc = float;
  static constexpr DataType kDtype = DataType::kFloat16;
  static __device__ float load(__half x) { return __half2float(x); }
  static __device__ float load_low(uint32_t pair) { return load(half_of(pair & 0xffffu)); }
  static __device__ float load_high(uint32_t pair) { return load(half_of(pair >> 16)); }
  static __device__ __half store(float x) { return __float2half_rn(x); }
  static __device__ uint32_t store_pair(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __half half_of(uint32_t bits) {
    return __ushort_as_half(static_cast<unsigned short>(bits));
  }
};
template <>
struct MergeElement<float> {
  using Acc = float;
  static constexpr DataType kDtype = DataType::kFloat32;
  static __device__ float load(float x) { return x; }
  static __device__ float store(float x) { return x; }
};
template <>
struct MergeElement<double> {
  using Acc = double;
  static constexpr DataType kDtype = DataType::kFloat64;
  static __device__ double load(double x) { return x; }
  static __device__ double store(double x) { return x; }
};

// The row of config.h for an element type, as constants that device code may read.
template <typename T>
struct MergeNumbers {
  static constexpr MergeStatesConfig kConfig = merge_states_config(MergeElement<T>::kDtype);
  static_assert(kConfig.element_bytes == sizeof(T));
  static_assert(kConfig.accumulator_bytes == sizeof(typename MergeElement<T>::Acc));
  static constexpr int kBlockThreads = kConfig.block_threads;
  static constexpr int kMinBlocks = kConfig.min_blocks;
  static constexpr int kInFlight = kConfig.states_in_flight;
  static constexpr int kVector = kConfig.vector_elements();
  static constexpr int kVectors = kConfig.thread_vectors;
};

// kWidth elements that travel together.
template <typename T, int kWidth, bool kPaired = sizeof(T) == 2 && kWidth % 2 == 0>
struct alignas(sizeof(T) * kWidth) MergeVector {
  T x[kWidth];

  __device__ auto get(int j) const { return MergeElement<T>::load(x[j]); }

  template <typename Acc>
  static __device__ MergeVector round(const Acc (&values)[kWidth]) {
    MergeVector v;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) v.x[j] = MergeElement<T>::store(values[j]);
    return v;
  }
};
// Pairs stay packed until they are used: taken apart at the load they would hold twice the
// registers, and put together at the store they leave as one vector.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) MergeVector<T, kWidth, true> {
  uint32_t pairs[kWidth / 2];

  __device__ float get(int j) const {
    return j % 2 == 0 ? MergeElement<T>::load_low(pairs[j / 2])
                      : MergeElement<T>::load_high(pairs[j / 2]);
  }

  static __device__ MergeVector round(const float (&values)[kWidth]) {
    MergeVector v;
#pragma unroll
    for (int j = 0; j < kWidth; j += 2)
      v.pairs[j / 2] = MergeElement<T>::store_pair(values[j], values[j + 1]);
    return v;
  }
};

struct MergeRow {
  int64_t at[kMergeLeadingDims];
  bool one_run;  // at[0] = at[1] = 0 in all rows, which saves two 64-bit products a pointer

  __device__ int64_t offset(const int64_t* stride) const {
    int64_t offset = at[2] * stride[2];
    if (!one_run) offset += at[0] * stride[0] + at[1] * stride[1];
    return offset;
  }
};

template <typename Int>
__device__ MergeRow split_row(Int row, Int size1, Int size2) {
  const Int rest = row / size2;
  return {{int64_t(rest / size1), int64_t(rest % size1), int64_t(row % size2)}, false};
}

__device__ inline MergeRow split_row(int64_t row, const MergeShape& shape) {
  if (shape.size[2] == shape.rows) return {{0, 0, row}, true};
  if (shape.rows <= int64_t{UINT32_MAX})  // a 64-bit division costs four 32-bit ones
    return split_row<uint32_t>(row, shape.size[1], shape.size[2]);
  return split_row<int64_t>(row, shape.size[1], shape.size[2]);
}

// The columns of one thread: kPieces vectors of kWidth elements, as far apart as the threads of a
// row are wide, which keeps neighbours' loads side by side.
template <int kWidth, int kPieces>
struct MergeColumns {
  uint32_t first;
  uint32_t dim;

  static __device__ uint32_t step() { return blockDim.x * kWidth; }
  __device__ bool has(int piece) const { return first + piece * step() < dim; }

  // Calls use(piece, offset of the piece from the start of its row) for each piece inside the row.
  template <typename Use>
  __device__ void for_each(Use use) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      if (has(piece)) use(piece, first + piece * step());
  }
};

// What one thread knows of its part of a row.
template <typename Acc, int kWidth, int kPieces>
struct MergeSums {
  Acc m = -INFINITY;                            // largest LSE so far
  Acc l = 0;                                    // sum of exp(lse_i - base())
  MergeVector<Acc, kWidth> sums[kPieces] = {};  // sum of exp(lse_i - base()) out_i

  // m, or 0 where m is no number to subtract: rows that are empty so far sum to 0, and an infinite
  // LSE stays infinite.
  __device__ Acc base() const { return isinf(m) ? Acc(0) : m; }

  // Moves the sums to a new maximum. Where m was -inf there is nothing to move: 0, or NaN.
  __device__ void raise(Acc new_m) {
    const Acc old_m = m;
    m = new_m;
    if (old_m != -INFINITY) scale(exp(old_m - base()));
  }

  __device__ void scale(Acc factor) {
    l *= factor;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[piece].x[j] *= factor;
  }
};

template <typename T, int kWidth, int kPieces>
__device__ void add_states(const MergeStatesParams& p, const MergeRow& row,
                           const MergeColumns<kWidth, kPieces>& columns,
                           MergeSums<typename MergeElement<T>::Acc, kWidth, kPieces>& state) {
  using Acc = typename MergeElement<T>::Acc;
  using Vector = MergeVector<T, kWidth>;
  constexpr int kInFlight = MergeNumbers<T>::kInFlight;
  for (int first = 0; first < p.num_states; first += kInFlight) {
    // Out rows are fetched before their weights are known: waiting for the LSE would double the
    // latency. An empty state's row is fetched too but never used.
    Vector o_reg[kInFlight][kPieces];
    Acc lse_reg[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      lse_reg[i] = -INFINITY;
      if (first + i < p.num_states) {
        const MergeState& from = p.states[first + i];
        lse_reg[i] = __ldg(static_cast<const Acc*>(from.lse) + row.offset(from.lse_stride));
        const T* out_row = static_cast<const T*>(from.out) + row.offset(from.out_stride);
        columns.for_each([&](int piece, uint32_t offset) {
          o_reg[i][piece] = *reinterpret_cast<const Vector*>(out_row + offset);
        });
      }
    }
    // fmax passes over NaN: it stays out of m, and comes in through the weight.
    Acc new_m = state.m;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) new_m = fmax(new_m, lse_reg[i]);
    state.raise(new_m);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (lse_reg[i] == -INFINITY) continue;  // empty: its out row may hold NaN
      const Acc weight = exp(lse_reg[i] - state.base());
      state.l += weight;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
        for (int j = 0; j < kWidth; ++j) state.sums[piece].x[j] += weight * o_reg[i][piece].get(j);
    }
  }
}

// One row, by the threads with the same threadIdx.y.
template <typename T, int kWidth, int kPieces>
__device__ void merge_row(const MergeStatesParams& p, int64_t r) {
  using Acc = typename MergeElement<T>::Acc;
  using Vector = MergeVector<T, kWidth>;
  using Sums = MergeVector<Acc, kWidth>;
  const MergeRow row = split_row(r, p.shape);
  MergeColumns<kWidth, kPieces> columns{threadIdx.x * kWidth, static_cast<uint32_t>(p.shape.dim)};
  do {  // once at least: with D = 0 there is still an LSE
    MergeSums<Acc, kWidth, kPieces> state;
    Acc* carried = static_cast<Acc*>(p.carry.sums) + r * p.shape.dim;
    if (p.carry.max_sum_in != nullptr) {
      state.m = static_cast<const Acc*>(p.carry.max_sum_in)[2 * r];
      state.l = static_cast<const Acc*>(p.carry.max_sum_in)[2 * r + 1];
      columns.for_each([&](int piece, uint32_t offset) {
        state.sums[piece] = *reinterpret_cast<const Sums*>(carried + offset);
      });
    }
    add_states<T, kWidth, kPieces>(p, row, columns, state);
    if (p.carry.max_sum_out != nullptr) {
      columns.for_each([&](int piece, uint32_t offset) {
        *reinterpret_cast<Sums*>(carried + offset) = state.sums[piece];
      });
      if (columns.first == 0) {
        static_cast<Acc*>(p.carry.max_sum_out)[2 * r] = state.m;
        static_cast<Acc*>(p.carry.max_sum_out)[2 * r + 1] = state.l;
      }
    } else {
      if (columns.first == 0) static_cast<Acc*>(p.lse)[r] = state.base() + log(state.l);
      state.scale(state.l == 0 ? Acc(0) : 1 / state.l);
      T* out_row = static_cast<T*>(p.out) + r * p.shape.dim;
      columns.for_each([&](int piece, uint32_t offset) {
        *reinterpret_cast<Vector*>(out_row + offset) = Vector::round(state.sums[piece].x);
      });
    }
    columns.first += kPieces * columns.step();
  } while (columns.has(0));
}

template <typename T>
__global__ void __launch_bounds__(MergeNumbers<T>::kBlockThreads, MergeNumbers<T>::kMinBlocks)
    merge_states_kernel(const __grid_constant__ MergeStatesParams p) {
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  for (int64_t r = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; r < p.shape.rows; r += step) {
    if (p.vectorised)
      merge_row<T, MergeNumbers<T>::kVector, MergeNumbers<T>::kVectors>(p, r);
    else
      merge_row<T, 1, MergeNumbers<T>::kVector>(p, r);
  }
}

}  // namespace flashbpt::sm80
