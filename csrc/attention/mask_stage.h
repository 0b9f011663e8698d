// A tile of a mask on its way to the scores: staged in shared memory, read as fragments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../params.h"
#include "../tile/copy.h"
#include "../tile/element.h"

namespace flashbpt {

// kRows x kCols elements of the mask's own type (1, 2 or 4 bytes), rows padded by one chunk so that
// the lanes of a fragment meet no bank conflict.
template <int kRows, int kCols, int kThreads>
class MaskStage {
 public:
  static constexpr int smem_bytes(int element_bytes) {
    return kRows * (kCols * element_bytes + tile::kChunkBytes);
  }

  __device__ MaskStage(const TensorView& mask, int access, uint32_t smem)
      : mask_(mask), smem_(smem), access_(access) {}

  // Starts copying the tile whose first element is (row, col) of the mask of one head; rows and
  // cols are what is left from there.
  __device__ void load(int64_t batch, int64_t head, int64_t row, int64_t col, int rows, int cols) {
    const int chunks = kCols * bytes() / tile::kChunkBytes;
    const int64_t first = batch * mask_.batch + head * mask_.head + row * mask_.row;
    const char* base = static_cast<const char*>(mask_.data) + (first + col * mask_.col) * bytes();
    const int row_bytes = min(cols, kCols) * bytes();
#pragma unroll 2
    for (int i = threadIdx.x; i < kRows * chunks; i += kThreads) {
      const int r = i / chunks, c = i % chunks;
      const char* from = base + r * mask_.row * bytes();
      const uint32_t to = smem_ + r * pitch() + c * tile::kChunkBytes;
      if (mask_.col == 1) {
        tile::copy_chunk(to, from, c, r < rows ? row_bytes : 0, access_);
      } else {
        const int left = (r < rows ? row_bytes : 0) - c * tile::kChunkBytes;
        const int per_chunk = tile::kChunkBytes / bytes();
        const int64_t stride = mask_.col * bytes();
        ptx::store_shared_16(to, gather(from + c * per_chunk * stride, left, stride));
      }
    }
  }

  // Scores under the mask: added, or -inf where it is false. (row, col): this lane's first element
  // in the tile.
  template <int kM, int kN>
  __device__ void apply(float (&s)[kM][kN][4], int row, int col) const {
    switch (mask_.dtype) {
      case DataType::kBool:
        return for_each_pair(s, row, col, [](float* x, uint32_t address) {
          const uint32_t word = ptx::load_shared(address & ~3u) >> (address % 4 * 8);
          if ((word & 0xffu) == 0) x[0] = -INFINITY;
          if ((word & 0xff00u) == 0) x[1] = -INFINITY;
        });
      case DataType::kBFloat16:
        return add_pairs<__nv_bfloat16>(s, row, col);
      case DataType::kFloat16:
        return add_pairs<__half>(s, row, col);
      default:
        return for_each_pair(s, row, col, [](float* x, uint32_t address) {
          x[0] += __uint_as_float(ptx::load_shared(address));
          x[1] += __uint_as_float(ptx::load_shared(address + 4));
        });
    }
  }

 private:
  __device__ uint4 gather(const char* from, int left, int64_t stride) const {
    if (bytes() == 1) return tile::gather_chunk<uint8_t>(from, left, stride);
    if (bytes() == 2) return tile::gather_chunk<uint16_t>(from, left, stride);
    return tile::gather_chunk<uint32_t>(from, left, stride);
  }

  template <typename T, int kM, int kN>
  __device__ void add_pairs(float (&s)[kM][kN][4], int row, int col) const {
    for_each_pair(s, row, col, [](float* x, uint32_t address) {
      const float2 pair = tile::Element<T>::unpack(ptx::load_shared(address));
      x[0] += pair.x;
      x[1] += pair.y;
    });
  }

  template <int kM, int kN, typename F>
  __device__ void for_each_pair(float (&s)[kM][kN][4], int row, int col, F f) const {
    const uint32_t first = smem_ + row * pitch() + col * bytes();
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kN; ++n)
          f(&s[m][n][2 * half], first + (16 * m + 8 * half) * pitch() + 8 * n * bytes());
  }

  __device__ int bytes() const { return element_bytes(mask_.dtype); }
  __device__ int pitch() const { return kCols * bytes() + tile::kChunkBytes; }

  const TensorView& mask_;
  uint32_t smem_;
  int access_;
};

}  // namespace flashbpt
