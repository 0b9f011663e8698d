// lse = log sum_i exp(lse_i)    O = sum_i exp(lse_i - lse) O_i
//
// over the parts of the items that several teams of paged_decode shared; a sink joins here.
//
// Who does what: the grid's axes are the split items, pieces of their rows, and kv heads. A warp
// takes 32 columns of a row; of an item in many parts a block does, and its warps share the parts.
//
// Barriers: for each piece that warps share when their states are there, and when they are read.
//
// docs/paged.md
#pragma once

#include "../../attention/softmax.h"
#include "../../ptx/grid.h"
#include "../../tile/element.h"
#include "config.h"
#include "launch.h"

namespace flashbpt::sm80 {

template <typename T>
struct PagedMerge {
  static constexpr PagedMergeConfig kConfig = kPagedMergeConfig;
  static constexpr int kWarps = kConfig.warps;
  static constexpr int kLanes = PagedMergeConfig::kLanes, kParts = PagedMergeConfig::kParts;

  // Sums relative to exp(top): of a lane's four columns, and of the weights.
  struct State {
    float top, sum, out[4];

    // Nothing was added to a state whose sum is 0; NaN stays, fmaxf passes over it.
    __device__ void add(const State& x) {
      if (x.sum == 0.0f) return;
      const float higher = fmaxf(top, x.top);
      const float mine = ptx::exp2((top - higher) * kLog2e),
                  other = ptx::exp2((x.top - higher) * kLog2e);
      top = higher;
      sum = sum * mine + x.sum * other;
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = out[i] * mine + x.out[i] * other;
    }
  };
  struct SmemPlan {
    State states[kWarps][kLanes];
  };

  const PagedDecodeParams& p;
  SmemPlan& smem;
  const int kv_head = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ void run() const {
    const bool all = static_cast<int>(gridDim.x) == p.schedule.teams;
    const int team = all ? static_cast<int>(blockIdx.x) : find_split(blockIdx.x);
    if (team < 0) return;
    const PagedSplit split = p.splits[team];
    if (split.parts == 0) return;
    const int columns = static_cast<int>(p.dim_v - 1) / PagedMergeConfig::kColumns + 1;
    const int pieces = split.rows * columns, every = gridDim.y;
    if (split.parts <= kConfig.parts_of_warp()) {
      for (int i = blockIdx.y * kWarps + warp; i < pieces; i += every * kWarps) {
        const Piece piece = piece_of(i, columns);
        const State state = add_parts(team, split.parts, piece, 0, 1);
        if (lane < kLanes) write(state, split, piece);
      }
      return;
    }
    for (int i = blockIdx.y; i < pieces; i += every) {
      const Piece piece = piece_of(i, columns);
      State state = add_parts(team, split.parts, piece, warp, kWarps);
      if (lane < kLanes) smem.states[warp][lane] = state;
      __syncthreads();  // the warps' states are there
      if (warp == 0 && lane < kLanes) {
#pragma unroll
        for (int w = 1; w < kWarps; ++w) state.add(smem.states[w][lane]);
        write(state, split, piece);
      }
      __syncthreads();  // they are read
    }
  }

  struct Piece {
    int row, column;  // of this lane, the first of four
  };
  __device__ Piece piece_of(int i, int columns) const {
    return {i / columns, i % columns * PagedMergeConfig::kColumns + lane % kLanes * 4};
  }

  // The team that leaves the n-th split; -1: there are no so many.
  __device__ int find_split(int n) const {
#pragma unroll 8
    for (int first = 0; first < p.schedule.teams; first += 32) {
      const int team = first + lane;
      const bool split = team < p.schedule.teams && p.splits[team].parts > 0;
      const unsigned splits = __ballot_sync(0xffffffffu, split);
      if (n < __popc(splits)) return first + static_cast<int>(__fns(splits, 0, n + 1));
      n -= __popc(splits);
    }
    return -1;
  }

  // The parts of a piece that are one worker's.
  __device__ State add_parts(int team, int count, Piece piece, int worker, int workers) const {
    const int width = p.partial_width();
    State state = {-INFINITY, 0.0f, {}};
#pragma unroll 1
    for (int first = worker * kParts + lane / kLanes; first < count;
         first += kConfig.unroll * workers * kParts) {
      State parts[kConfig.unroll];
#pragma unroll
      for (int j = 0; j < kConfig.unroll; ++j) {
        const int part = first + j * workers * kParts;
        parts[j] = {-INFINITY, 0.0f, {}};
        if (part >= count) continue;
        const int64_t row = int64_t{p.schedule.partial_slot(team + part, kv_head, part == 0)} *
                                p.schedule.tile_rows +
                            piece.row;
        parts[j].top = p.partial_lse[row];
        parts[j].sum = parts[j].top == -INFINITY ? 0.0f : 1.0f;
        if (piece.column >= width) continue;
        const float4 out =
            *reinterpret_cast<const float4*>(p.partial_out + row * width + piece.column);
        parts[j].out[0] = out.x, parts[j].out[1] = out.y;
        parts[j].out[2] = out.z, parts[j].out[3] = out.w;
      }
#pragma unroll
      for (int j = 0; j < kConfig.unroll; ++j) state.add(parts[j]);
    }
    __syncwarp();
#pragma unroll
    for (int d = kLanes; d < 32; d *= 2) {
      State other;
      other.top = __shfl_xor_sync(0xffffffffu, state.top, d);
      other.sum = __shfl_xor_sync(0xffffffffu, state.sum, d);
#pragma unroll
      for (int j = 0; j < 4; ++j) other.out[j] = __shfl_xor_sync(0xffffffffu, state.out[j], d);
      state.add(other);
    }
    return state;
  }

  __device__ void write(State state, const PagedSplit& split, Piece piece) const {
    const PagedRow at = row_of(p.schedule, split.row_tile, kv_head, piece.row);
    const int c = piece.column;
    if (p.sinks) {
      const float sink = static_cast<const float*>(p.sinks.data)[at.head];
      state.add({sink, sink == -INFINITY ? 0.0f : 1.0f, {}});
    }
    const float factor = state.sum == 0.0f ? 0.0f : 1.0f / state.sum;
    const int64_t token = split.row_begin + at.token;
    T* const out = static_cast<T*>(p.out.data) + token * p.out.row + at.head * p.out.head;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (c + j < p.dim_v) out[c + j] = tile::Element<T>::from_float(state.out[j] * factor);
    if (c == 0)
      static_cast<float*>(p.lse.data)[token * p.lse.row + at.head] =
          state.sum == 0.0f ? -INFINITY : state.top + logf(state.sum);
  }
};

template <typename T>
__global__ void __launch_bounds__(kPagedMergeConfig.threads(), kPagedMergeConfig.min_blocks)
    paged_merge_kernel(const __grid_constant__ PagedDecodeParams p) {
  ptx::follow_earlier_grids();
  __shared__ typename PagedMerge<T>::SmemPlan smem;
  PagedMerge<T>{p, smem}.run();
}

}  // namespace flashbpt::sm80
