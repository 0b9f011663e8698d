// What several teams did of one item, joined by the blocks that did it: no second kernel, and every
// multiprocessor has its piece.
//
// A block leaves its part as a partial state, arrives at the item's barrier, and at the end of its
// share waits there for the others. Then each joins its own piece of the item's rows. Nothing says
// that all blocks are on the GPU at the same time: one that has waited for long gives up, and
// leaves its piece to the block that arrives last. What the barrier orders: a part is written
// before its block arrives, and read after all have; giving up is written before the barrier is
// read once more, so that either the block sees that all are there or the last one sees that it has
// given up.
//
// Barriers are words in global memory, zero in their low 31 bits between kernels. The block that
// begins the item adds 2^31 - (parts - 1) and the others 1: when all have, the top bit has turned
// over and the rest is zero again (so do the grid barriers of CUDA's cooperative groups). Words
// that say who has given up lie apart from them, and are zero between kernels.
#pragma once

#include "../../attention/softmax.h"
#include "../../ptx/reduce.h"
#include "launch.h"
#include "segments.h"

namespace flashbpt::sm80 {

// An item in parts, as a block that has one of them sees it.
struct PagedSplit {
  int first_team;   // whose block has the first part; the next ones have the others
  int parts, part;  // how many, and this block's
  int row_begin, row_tile;
  int rows;          // of the item, at most tile_rows
  unsigned arrived;  // the barrier before this block arrived
  bool last;         // it was the last to arrive
};

template <PagedDecodeConfig kConfig>
class PagedParts {
 public:
  static constexpr int kWarps = kConfig.warps, kThreads = kConfig.threads();

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

  struct Smem {
    PagedSplit splits[2];  // the item that the share ends or is part of, and the one that it begins
    long long started;     // clock
    unsigned given_up[kWarps];
    bool complete;
  };

  // states_smem: where nobody reads or writes anything else during finish().
  __device__ PagedParts(const PagedDecodeParams& p, int team, int kv_head, Smem& smem,
                        void* states_smem)
      : p_(p),
        team_(team),
        kv_head_(kv_head),
        smem_(smem),
        states_smem_(static_cast<State (*)[kLanes]>(states_smem)) {}

  // Before the first segment; the caller synchronizes.
  __device__ void start() const {
    if (threadIdx.x < 2) smem_.splits[threadIdx.x].parts = 0;
    if (threadIdx.x == 0) smem_.started = clock64();
  }

  // After the threads' stores of a part and a __syncthreads.
  __device__ void arrive(const Segment& s, int each) const {
    if (threadIdx.x != 0) return;
    const int before = (s.before + each - 1) / each, after = (s.after + each - 1) / each;
    const int group = static_cast<int>(p_.schedule.group.value());
    PagedSplit split = {team_ - before, 1 + before + after, before, s.request.row_begin,
                        s.row_tile};
    split.rows = min(kConfig.rows, s.request.rows * group - s.row_tile * kConfig.rows);
    const unsigned step = before == 0 ? 0x80000000u - (split.parts - 1) : 1;
    split.arrived = ptx::add_acquire_release(barrier(split), step);
    split.last = (split.arrived ^ (split.arrived + step)) >> 31;
    smem_.splits[s.first] = split;
  }

  // At the end of the share. store(at, x, columns): four columns of the output, or what is left.
  template <typename Store>
  __device__ void finish(Store store) const {
    __syncthreads();  // the splits are there
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const PagedSplit& split = smem_.splits[i];
      if (split.parts == 0) continue;
      if (threadIdx.x == 0) smem_.complete = split.last || wait(split);
      __syncthreads();  // complete is there, and with it the other blocks' parts
      join(split, smem_.complete, store);
      __syncthreads();  // complete is read
    }
  }

 private:
  static constexpr int kUnroll = PagedDecodeConfig::kJoinLoads;
  static constexpr int kLanes = PagedDecodeConfig::kJoinLanes;
  static constexpr int kMany = PagedDecodeConfig::kManyParts;
  static_assert(sizeof(State) * kLanes * kWarps <= kConfig.q_bytes());

  __device__ int32_t* barrier(const PagedSplit& split) const {
    return p_.barriers + split.first_team * static_cast<int>(p_.schedule.heads_kv.value()) +
           kv_head_;
  }
  __device__ volatile int32_t* given_up(const PagedSplit& split, int part) const {
    const int block = (split.first_team + part) * static_cast<int>(p_.schedule.heads_kv.value());
    return p_.barriers + kMostBlocks + 2 * (block + kv_head_) + (part == 0);
  }

  __device__ bool all_arrived(const PagedSplit& split) const {
    return (ptx::load_acquire(barrier(split)) ^ split.arrived) >> 31;
  }
  // Not longer than the block's share has taken: the others' take as long.
  __device__ bool wait(const PagedSplit& split) const {
    const long long until = 2 * clock64() - smem_.started;
    while (!all_arrived(split)) {
      if (clock64() < until) {
        __nanosleep(100);
        continue;
      }
      *given_up(split, split.part) = 1;
      __threadfence();  // it is written before the barrier is read
      if (!all_arrived(split)) return false;
      *given_up(split, split.part) = 0;  // whether the last one has seen it or not
      return true;
    }
    return true;
  }

  // This block's piece if all have arrived, and if it was the last the pieces of those who have
  // given up.
  template <typename Store>
  __device__ void join(const PagedSplit& split, bool complete, Store store) const {
#pragma unroll 1
    for (int first = 0; first < split.parts; first += kThreads) {
      if (split.last) find_given_up(split, first);
#pragma unroll 1
      for (int w = 0; w < kWarps; ++w) {
        const int part = first + 32 * w;
        unsigned pieces = split.last ? smem_.given_up[w] : 0;
        if (complete && split.part / 32 == part / 32) pieces |= 1u << split.part % 32;
#pragma unroll 1
        for (; pieces; pieces &= pieces - 1) join_piece(split, part + __ffs(pieces) - 1, store);
      }
    }
  }
  __device__ void find_given_up(const PagedSplit& split, int first) const {
    __threadfence();  // the block has arrived before this is read
    const int part = first + threadIdx.x;
    const bool left = part < split.parts && *given_up(split, part) != 0;
    if (left) *given_up(split, part) = 0;
    const unsigned parts = __ballot_sync(0xffffffffu, left);
    __syncthreads();  // nobody reads the earlier ones
    if (threadIdx.x % 32 == 0) smem_.given_up[threadIdx.x / 32] = parts;
    __syncthreads();  // they are there
  }

  template <typename Store>
  __device__ void join_piece(const PagedSplit& split, int piece, Store store) const {
    if (split.parts <= kUnroll / 4) return join_few<4>(split, piece, store);
    if (split.parts <= kUnroll / 2) return join_few<2>(split, piece, store);
    join_many(split, piece, store);
  }

  // A lane joins four columns of a row at kPlaces places at a time.
  template <int kPlaces, typename Store>
  __device__ void join_few(const PagedSplit& split, int piece, Store store) const {
    constexpr int kStep = kThreads * kPlaces, kParts = kUnroll / kPlaces;
    const int width = p_.partial_width() / 4, count = split.rows * width;
#pragma unroll 1
    for (int first = piece * kStep; first < count; first += split.parts * kStep) {
      float top[kPlaces][kParts];
      float4 out[kPlaces][kParts];
#pragma unroll
      for (int k = 0; k < kPlaces; ++k) {
        const int i = min(first + k * kThreads + static_cast<int>(threadIdx.x), count - 1);
        load_parts(split, i / width, i % width, 0, 1, top[k], out[k]);
      }
#pragma unroll
      for (int k = 0; k < kPlaces; ++k) {
        const int i = first + k * kThreads + threadIdx.x;
        if (i < count) write(split, i / width, i % width * 4, sum_of(top[k], out[k]), store);
      }
    }
  }

  // Several lanes join four columns, each of them kUnroll parts at a time; lanes that share a part
  // have neighbouring columns, 8 of them at least. Of an item in very many parts all warps join the
  // same columns.
  template <typename Store>
  __device__ void join_many(const PagedSplit& split, int piece, Store store) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = split.parts;
    int sharing = 1;
    while (sharing < 32 / kLanes && sharing * kUnroll < parts) sharing *= 2;
    const bool all = parts > kMany;
    const int apart = 32 / sharing, step = all ? apart : kWarps * apart;
    const int width = p_.partial_width() / 4, count = split.rows * width;
#pragma unroll 1
    for (int first = piece * step; first < count; first += parts * step) {
      const int i = first + (all ? 0 : warp * apart) + lane % apart, at = min(i, count - 1);
      const int begin = all ? threadIdx.x / apart : lane / apart;
      const int every = all ? kThreads / apart : sharing;
      State state = {-INFINITY, 0.0f, {}};
#pragma unroll 1
      for (int part = begin; part < parts; part += kUnroll * every) {
        float top[kUnroll];
        float4 out[kUnroll];
        load_parts(split, at / width, at % width, part, every, top, out);
        state.add(sum_of(top, out));
      }
#pragma unroll 1
      for (int d = apart; d < 32; d *= 2) state.add(of_lane(state, lane ^ d));
      if (all) {
        if (lane < apart) states_smem_[warp][lane] = state;
        __syncthreads();  // the warps' states are there
#pragma unroll 1
        for (int w = 1; w < kWarps && threadIdx.x < apart; ++w) state.add(states_smem_[w][lane]);
      }
      if (lane < apart && i < count && (warp == 0 || !all))
        write(split, i / width, i % width * 4, state, store);
      if (all) __syncthreads();  // they are read
    }
  }

  // Starts loading every `every`-th part from `begin` on; -inf stands for the LSE of none.
  template <int kParts>
  __device__ void load_parts(const PagedSplit& split, int row, int column, int begin, int every,
                             float (&top)[kParts], float4 (&out)[kParts]) const {
    const PagedSchedule& s = p_.schedule;
    const int next = s.partial_row(1, 0, false, 0);  // a part's rows from those of the one before
    const int first_row = s.partial_row(split.first_team, kv_head_, false, row);
    const int first_lse = s.partial_lse(split.first_team, kv_head_, false, row);
    const int64_t width = p_.partial_width() / 4;
    const float4* const outs = reinterpret_cast<const float4*>(p_.partial_out) + column;
    const int last = split.parts - 1;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const int part = min(begin + j * every, last), began = part == 0;
      top[j] = __ldcg(p_.partial_lse + first_lse + 2 * part + began);
      out[j] = __ldcg(outs + (first_row + part * next + began * kConfig.rows) * width);
    }
#pragma unroll
    for (int j = 0; j < kParts; ++j)
      if (begin + j * every > last) top[j] = -INFINITY;
  }

  template <int kParts>
  static __device__ State sum_of(const float (&top)[kParts], const float4 (&out)[kParts]) {
    State sum = {-INFINITY, 0.0f, {}};
#pragma unroll
    for (int j = 0; j < kParts; ++j) sum.top = fmaxf(sum.top, top[j]);
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      if (top[j] == -INFINITY) continue;
      const float weight = ptx::exp2((top[j] - sum.top) * kLog2e);
      sum.sum += weight;
      sum.out[0] += weight * out[j].x, sum.out[1] += weight * out[j].y;
      sum.out[2] += weight * out[j].z, sum.out[3] += weight * out[j].w;
    }
    return sum;
  }
  static __device__ State of_lane(const State& mine, int lane) {
    State other;
    other.top = __shfl_sync(0xffffffffu, mine.top, lane);
    other.sum = __shfl_sync(0xffffffffu, mine.sum, lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) other.out[j] = __shfl_sync(0xffffffffu, mine.out[j], lane);
    return other;
  }

  template <typename Store>
  __device__ void write(const PagedSplit& split, int row, int column, State state,
                        Store store) const {
    const PagedRow at = row_of(p_.schedule, split.row_tile, kv_head_, row);
    if (p_.sinks) {
      const float sink = static_cast<const float*>(p_.sinks.data)[at.head];
      state.add({sink, sink == -INFINITY ? 0.0f : 1.0f, {}});
    }
    const float factor = state.sum == 0.0f ? 0.0f : 1.0f / state.sum;
    const int64_t token = split.row_begin + at.token;
#pragma unroll
    for (int j = 0; j < 4; ++j) state.out[j] *= factor;
    store(token * p_.out.row + at.head * p_.out.head + column, state.out,
          static_cast<int>(p_.dim_v) - column);
    if (column == 0)
      static_cast<float*>(p_.lse.data)[token * p_.lse.row + at.head] =
          state.sum == 0.0f ? -INFINITY : state.top + logf(state.sum);
  }

  const PagedDecodeParams& p_;
  const int team_, kv_head_;
  Smem& smem_;
  State (*const states_smem_)[kLanes];
};

}  // namespace flashbpt::sm80
