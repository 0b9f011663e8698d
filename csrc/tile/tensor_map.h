// Tensor maps of the copy engine, made on the host ("Tensor Map Object Management", CUDA Driver
// API).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <stdexcept>
#include <string>

#include "../params.h"

namespace flashbpt::tile {

inline std::string describe(const TensorView& t, const uint64_t (&sizes)[4], int box_rows,
                            int code) {
  char text[400];
  std::snprintf(
      text, sizeof(text),
      "flashbpt: cuTensorMapEncodeTiled failed with %d: address %p, columns %llu, rows %llu, heads "
      "%llu, batch %llu, strides (elements) row %lld, head %lld, batch %lld, box 64 x %d",
      code, t.data, static_cast<unsigned long long>(sizes[0]),
      static_cast<unsigned long long>(sizes[1]), static_cast<unsigned long long>(sizes[2]),
      static_cast<unsigned long long>(sizes[3]), static_cast<long long>(t.row),
      static_cast<long long>(t.head), static_cast<long long>(t.batch), box_rows);
  return text;
}

// Boxes of 64 columns x box_rows rows of one head, with 128-byte swizzle, of a 16-bit tensor
// [batch, heads, rows, cols]. What lies outside of a head reads as zero. The address and the
// strides have to be multiples of 16 bytes. A dimension of heads or batch elements that is
// broadcast (stride 0) has one coordinate, 0.
inline CUtensorMap make_tensor_map(const TensorView& t, int64_t cols, int64_t rows, int64_t heads,
                                   int64_t batch, int box_rows) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                     &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  if (encode == nullptr) {
    throw std::runtime_error("flashbpt: the CUDA driver has no cuTensorMapEncodeTiled");
  }
  // Strides of dimensions of size 1 may be anything; the map wants multiples of 16 bytes.
  const auto stride = [](uint64_t size, int64_t elements) {
    return size > 1 ? static_cast<uint64_t>(elements) * 2 : uint64_t{16};
  };
  const auto steps = [](int64_t size, int64_t stride) {
    return static_cast<uint64_t>(stride == 0 ? 1 : size);
  };
  const uint64_t sizes[] = {static_cast<uint64_t>(cols), static_cast<uint64_t>(rows),
                            steps(heads, t.head), steps(batch, t.batch)};
  const uint64_t strides[] = {stride(rows, t.row), stride(sizes[2], t.head),
                              stride(sizes[3], t.batch)};
  const uint32_t box[] = {64, static_cast<uint32_t>(box_rows), 1, 1}, every[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult code = encode(&map,
                               t.dtype == DataType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                               4, t.data, sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) throw std::runtime_error(describe(t, sizes, box_rows, code));
  return map;
}

}  // namespace flashbpt::tile
