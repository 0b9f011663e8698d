// Neighbouring elements of a row, in as few vectors of 16 bytes as hold them.
#pragma once

#include "vector.h"

namespace flashbpt::tile {

template <typename T, int kWidth>
struct Run {
  static constexpr int kVector = kWidth * sizeof(T) < 16 ? kWidth : 16 / sizeof(T);
  static_assert(kWidth % kVector == 0);
  Vector<T, kVector> vectors[kWidth / kVector];

  __device__ float get(int i) const { return vectors[i / kVector].get(i % kVector); }

  static __device__ Run round(const float* x) {
    Run run;
#pragma unroll
    for (int i = 0; i < kWidth; i += kVector)
      run.vectors[i / kVector] = Vector<T, kVector>::round(x + i);
    return run;
  }

  // The first `there` elements at `from`, and zeros; single elements where `from` is not a multiple
  // of a vector or where some are missing.
  static __device__ Run load(const T* from, int there, bool vectorised) {
    if (vectorised && there >= kWidth) {
      Run run;
#pragma unroll
      for (int i = 0; i < kWidth; i += kVector)
        run.vectors[i / kVector] = *reinterpret_cast<const Vector<T, kVector>*>(from + i);
      return run;
    }
    float x[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = i < there ? Element<T>::to_float(from[i]) : 0.0f;
    return round(x);
  }

  __device__ void store(T* to, int there, bool vectorised) const {
    if (vectorised && there >= kWidth) {
#pragma unroll
      for (int i = 0; i < kWidth; i += kVector)
        *reinterpret_cast<Vector<T, kVector>*>(to + i) = vectors[i / kVector];
      return;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      if (i < there) to[i] = Element<T>::from_float(get(i));
  }
};

}  // namespace flashbpt::tile
