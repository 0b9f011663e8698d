// Elements of a row that travel together, as one load or store.
#pragma once

#include <type_traits>

#include "element.h"

namespace flashbpt::tile {

template <typename T, int kWidth, bool kPaired = sizeof(T) == 2 && kWidth % 2 == 0>
struct alignas(sizeof(T) * kWidth) Vector {
  T x[kWidth];

  __device__ auto get(int j) const {
    if constexpr (std::is_floating_point_v<T>)  // double stays double
      return x[j];
    else
      return Element<T>::to_float(x[j]);
  }

  template <typename Acc>
  static __device__ Vector round(const Acc* values) {
    Vector v;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if constexpr (std::is_floating_point_v<T>)
        v.x[j] = values[j];
      else
        v.x[j] = Element<T>::from_float(values[j]);
    }
    return v;
  }
};

// Pairs stay packed until they are used: taken apart at the load they would hold twice the
// registers, and put together at the store they leave as one vector.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector<T, kWidth, true> {
  uint32_t pairs[kWidth / 2];

  __device__ float get(int j) const {
    const float2 pair = Element<T>::unpack(pairs[j / 2]);
    return j % 2 == 0 ? pair.x : pair.y;
  }

  static __device__ Vector round(const float* values) {
    Vector v;
#pragma unroll
    for (int j = 0; j < kWidth; j += 2) v.pairs[j / 2] = Element<T>::pack(values[j], values[j + 1]);
    return v;
  }
};

}  // namespace flashbpt::tile
