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

#include <type_traits>

#include "../../ptx/grid.h"
#include "../../tile/vector.h"
#include "config.h"
#include "launch.h"

namespace flashbpt::sm80 {

template <typename T>
using MergeAcc = std::conditional_t<sizeof(T) == 8, double, float>;

// The row of config.h for an element type, as constants that device code may read.
template <typename T>
struct MergeNumbers {
  static constexpr MergeStatesConfig kConfig = [] {
    if constexpr (sizeof(T) == 8)
      return merge_states_config(DataType::kFloat64);
    else
      return merge_states_config(tile::Element<T>::kDtype);
  }();
  static_assert(kConfig.element_bytes == sizeof(T));
  static_assert(kConfig.accumulator_bytes == sizeof(MergeAcc<T>));
  static constexpr int kBlockThreads = kConfig.block_threads;
  static constexpr int kMinBlocks = kConfig.min_blocks;
  static constexpr int kInFlight = kConfig.states_in_flight;
  static constexpr int kVector = kConfig.vector_elements();
  static constexpr int kVectors = kConfig.thread_vectors;
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
  Acc m = -INFINITY;                             // largest LSE so far
  Acc l = 0;                                     // sum of exp(lse_i - base())
  tile::Vector<Acc, kWidth> sums[kPieces] = {};  // sum of exp(lse_i - base()) out_i

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
                           MergeSums<MergeAcc<T>, kWidth, kPieces>& state) {
  using Acc = MergeAcc<T>;
  using Vector = tile::Vector<T, kWidth>;
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
  using Acc = MergeAcc<T>;
  using Vector = tile::Vector<T, kWidth>;
  using Sums = tile::Vector<Acc, kWidth>;
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
  ptx::follow_earlier_grids();
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  for (int64_t r = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; r < p.shape.rows; r += step) {
    if (p.vectorised)
      merge_row<T, MergeNumbers<T>::kVector, MergeNumbers<T>::kVectors>(p, r);
    else
      merge_row<T, 1, MergeNumbers<T>::kVector>(p, r);
  }
}

}  // namespace flashbpt::sm80
