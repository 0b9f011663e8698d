// A tile of a mask on its way to the scores: staged in shared memory, read as fragments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../params.h"
#include "../tile/copy.h"
#include "../tile/element.h"

namespace flashbpt {

// Rows of elements of kElementBytes, padded by one chunk so that the lanes of a fragment meet no
// bank conflict.
template <int kCols, int kElementBytes>
struct PaddedTile {
  static constexpr int kChunks = kCols * kElementBytes / tile::kChunkBytes;
  static constexpr int kRowBytes = (kChunks + 1) * tile::kChunkBytes;

  uint32_t base;

  __device__ uint32_t chunk(int row, int c) const {
    return base + row * kRowBytes + c * tile::kChunkBytes;
  }
};

// What masks come to a kernel.
enum class MaskKind { kBoolean, kAdditive, kAny };

// kRows x kCols elements of the mask's own type: 1, 2 or 4 bytes.
template <int kRows, int kCols, int kThreads, MaskKind kKind>
class MaskStage {
 public:
  __device__ MaskStage(const TensorView& mask, int access, uint32_t smem)
      : mask_(mask), smem_(smem), access_(access) {}

  __device__ bool additive() const {
    return kKind == MaskKind::kAdditive ||
           (kKind == MaskKind::kAny && mask_.dtype != DataType::kBool);
  }

  // Starts copying the tile whose first element is (row, col) of the mask of one head; rows and
  // cols are what is left from there.
  __device__ void load(int64_t batch, int64_t head, int64_t row, int64_t col, int rows, int cols) {
    const int64_t first = batch * mask_.batch + head * mask_.head + row * mask_.row;
    const int64_t at = first + col * mask_.col;
    if (!additive()) return load_elements<uint8_t>(at, rows, cols);
    switch (mask_.dtype) {
      case DataType::kBFloat16:
      case DataType::kFloat16:
        return load_elements<uint16_t>(at, rows, cols);
      default:
        return load_elements<uint32_t>(at, rows, cols);
    }
  }

  // Scores under the mask: times `factor` and added, or -inf where it is false. (row, col): this
  // lane's first element in the tile.
  template <int kM, int kN>
  __device__ void apply(float (&s)[kM][kN][4], int row, int col, float factor) const {
    if (!additive()) {
      const int shift = col % 4 * 8;  // of this lane's two bytes in their word
      return for_each_pair<1>(s, row, col - col % 4, [&](float* x, uint32_t address) {
        const uint32_t word = ptx::load_shared(address) >> shift;
        if ((word & 0xffu) == 0) x[0] = -INFINITY;
        if ((word & 0xff00u) == 0) x[1] = -INFINITY;
      });
    }
    switch (mask_.dtype) {
      case DataType::kBFloat16:
        return add_pairs<__nv_bfloat16>(s, row, col, factor);
      case DataType::kFloat16:
        return add_pairs<__half>(s, row, col, factor);
      default:
        return for_each_pair<4>(s, row, col, [&](float* x, uint32_t address) {
          const float2 pair = ptx::load_shared_float2(address);
          x[0] = fmaf(x[0], factor, pair.x);
          x[1] = fmaf(x[1], factor, pair.y);
        });
    }
  }

 private:
  // first: of the tile's first element in the mask.
  template <typename Element>
  __device__ void load_elements(int64_t first, int rows, int cols) const {
    constexpr int kBytes = sizeof(Element);
    using Tile = PaddedTile<kCols, kBytes>;
    const Tile to{smem_};
    const char* from = static_cast<const char*>(mask_.data) + first * kBytes;
    const int row_bytes = min(cols, kCols) * kBytes;
    if (mask_.col == 1) {
      tile::load_tile<kRows, kThreads>(to, {from, mask_.row * kBytes, access_}, rows, row_bytes);
    } else {
      constexpr int kPerChunk = tile::kChunkBytes / kBytes;
      const int64_t stride = mask_.col * kBytes;
#pragma unroll 1
      for (int i = threadIdx.x; i < kRows * Tile::kChunks; i += kThreads) {
        const int r = i / Tile::kChunks, c = i % Tile::kChunks;
        const int left = (r < rows ? row_bytes : 0) - c * tile::kChunkBytes;
        const char* chunk = from + r * mask_.row * kBytes + c * kPerChunk * stride;
        ptx::store_shared_16(to.chunk(r, c), tile::gather_chunk<Element>(chunk, left, stride));
      }
    }
  }

  template <typename T, int kM, int kN>
  __device__ void add_pairs(float (&s)[kM][kN][4], int row, int col, float factor) const {
    for_each_pair<2>(s, row, col, [&](float* x, uint32_t address) {
      const float2 pair = tile::Element<T>::unpack(ptx::load_shared(address));
      x[0] = fmaf(x[0], factor, pair.x);
      x[1] = fmaf(x[1], factor, pair.y);
    });
  }

  // kBytes: of an element, so that all addresses lie at constant distances from one.
  template <int kBytes, int kM, int kN, typename F>
  __device__ void for_each_pair(float (&s)[kM][kN][4], int row, int col, F f) const {
    constexpr int kRowBytes = PaddedTile<kCols, kBytes>::kRowBytes;
    const uint32_t first = smem_ + row * kRowBytes + col * kBytes;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kN; ++n)
          f(&s[m][n][2 * half], first + (16 * m + 8 * half) * kRowBytes + 8 * n * kBytes);
  }

  const TensorView& mask_;
  uint32_t smem_;
  int access_;
};

}  // namespace flashbpt
