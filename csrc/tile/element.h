// Element types of tensors and their conversion to and from fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../params.h"

namespace flashbpt::tile {

// 16-bit types also as a pair in one register, the first element in the low half. Conversions to
// them round to nearest even.
template <typename T>
struct Element;

template <>
struct Element<float> {
  static constexpr DataType kDtype = DataType::kFloat32;
  static __device__ float to_float(float x) { return x; }
  static __device__ float from_float(float x) { return x; }
};

template <>
struct Element<__nv_bfloat16> {
  static constexpr DataType kDtype = DataType::kBFloat16;
  static __device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
  static __device__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ float2 unpack(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
};

template <>
struct Element<__half> {
  static constexpr DataType kDtype = DataType::kFloat16;
  static __device__ float to_float(__half x) { return __half2float(x); }
  static __device__ __half from_float(float x) { return __float2half_rn(x); }
  static __device__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ float2 unpack(uint32_t pair) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
};

template <DataType kDtype>
struct ElementOf;
template <>
struct ElementOf<DataType::kFloat32> {
  using Type = float;
};
template <>
struct ElementOf<DataType::kBFloat16> {
  using Type = __nv_bfloat16;
};
template <>
struct ElementOf<DataType::kFloat16> {
  using Type = __half;
};

}  // namespace flashbpt::tile
