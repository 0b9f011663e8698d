// Copies of boxes of a tensor by the copy engine (PTX ISA 9.7.9.27, cp.async.bulk.tensor). The
// tensor map is a __grid_constant__ parameter of the kernel; tile/tensor_map.h makes it.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashbpt::ptx {

// How long a line should stay in L2, as createpolicy encodes it.
enum class CacheHint : uint64_t {
  kEvictFirst = 0x12f0000000000000,
  kEvictLast = 0x14f0000000000000
};

__device__ inline void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts the copy of the box at these coordinates, the first along columns, to shared memory; its
// bytes count at `mbarrier`. Elements outside of the tensor become zeros, and count as well.
__device__ inline void tma_load_4d(uint32_t smem, const CUtensorMap& map, uint32_t mbarrier,
                                   CacheHint hint, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem),
      "l"(&map), "r"(mbarrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(static_cast<uint64_t>(hint))
      : "memory");
}

}  // namespace flashbpt::ptx
