// What a thread has of a head: two pieces of neighbouring columns, which turn together.
#pragma once

#include "../../tile/run.h"
#include "launch.h"

namespace flashbpt::sm80 {

// kPiece 1: single elements, of which a lane has many units, one after the other.
template <int kPiece>
struct RopeColumns {
  int at[2];   // where the pieces begin
  int pair;    // the first of kPiece pairs
  bool turns;  // or all columns stay as they are

  __device__ RopeColumns(const RopeParams& p, int unit)
      : pair(unit * kPiece), turns(unit * kPiece < p.pairs) {
    const bool halves = turns && !p.interleaved;
    at[0] = halves ? pair : 2 * pair;
    at[1] = halves ? pair + p.pairs : 2 * pair + kPiece;
  }

  // Of piece i: all of its columns, or, of an odd dim's last unit, none.
  static __device__ int there(const RopeParams& p, int column) {
    return kPiece > 1 ? kPiece : p.dim - column;
  }
};

// The elements of a unit, rounded: half the registers of the same in fp32.
template <typename T, int kPiece>
struct RopeUnit {
  tile::Run<T, kPiece> pieces[2];

  __device__ float get(int i) const { return pieces[i / kPiece].get(i % kPiece); }

  static __device__ RopeUnit load(const T* head, const RopeParams& p,
                                  const RopeColumns<kPiece>& columns) {
    RopeUnit unit;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      unit.pieces[i] =
          tile::Run<T, kPiece>::load(head + columns.at[i], columns.there(p, columns.at[i]), true);
    return unit;
  }
};

template <int kPiece>
using RopeElements = float[2 * kPiece];

template <typename T, int kPiece>
__device__ void store_elements(const RopeElements<kPiece>& e, T* head, const RopeParams& p,
                               const RopeColumns<kPiece>& columns) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    tile::Run<T, kPiece>::round(e + i * kPiece)
        .store(head + columns.at[i], columns.there(p, columns.at[i]), true);
}

// cos and sin of a unit's pairs. Loaded with its elements: waiting for those first would double the
// latency.
template <int kPiece>
struct RopeAngles {
  using Run = tile::Run<float, kPiece>;
  Run cos, sin;

  static __device__ RopeAngles load(const RopeParams& p, int64_t row,
                                    const RopeColumns<kPiece>& columns) {
    if (!columns.turns) return {};
    const int64_t at = row * p.pairs + columns.pair;
    return {Run::load(p.cos + at, kPiece, true), Run::load(p.sin + at, kPiece, true)};
  }

  // (a, b) -> (a cos - b sin, b cos + a sin), or back with sign = -1.
  __device__ void turn(RopeElements<kPiece>& e, const RopeParams& p,
                       const RopeColumns<kPiece>& columns, float sign) const {
    if (!columns.turns) return;
    if (p.interleaved) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) turn_pair(e[2 * i], e[2 * i + 1], i, sign);
    } else {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) turn_pair(e[i], e[kPiece + i], i, sign);
    }
  }

 private:
  __device__ void turn_pair(float& a, float& b, int i, float sign) const {
    const float c = cos.get(i), s = sign * sin.get(i), before = a;
    a = a * c - b * s;
    b = b * c + before * s;
  }
};

// Where a thread is: its neighbouring heads of a row, and its place among the lanes of those.
struct RopePlace {
  int64_t row;
  int first, lane;
  int heads;  // that there are from `first` on; 0 or less: none

  __device__ int64_t offset(const TensorView& t, int head) const {
    return row * t.row + (first + head) * t.head;
  }

  // use(columns) of each of the thread's units; with pieces there is at most one.
  template <int kPiece, typename Use>
  __device__ void for_each_unit(const RopeParams& p, Use use) const {
    const int units = (p.dim + 2 * kPiece - 1) / (2 * kPiece);
    if constexpr (kPiece > 1) {
      if (lane < units) use(RopeColumns<kPiece>(p, lane));
    } else {
      for (int unit = lane; heads > 0 && unit < units; unit += 32)
        use(RopeColumns<kPiece>(p, unit));
    }
  }
};

}  // namespace flashbpt::sm80
