// The numbers of the rope kernels.
#pragma once

namespace flashbpt::sm80 {

struct RopeConfig {
  int block_threads;
  int piece;       // columns; a thread has two pieces, which turn together
  int tensors;     // that are read
  int min_blocks;  // a multiprocessor holds at least so many: the register budget

  constexpr int unit() const { return 2 * piece; }
  constexpr int max_dim() const { return 32 * unit(); }  // wider heads go element by element
  // Sums of dweight, of each group of lanes that shares a head.
  constexpr int smem_bytes(int lanes, int dim) const { return block_threads / lanes * dim * 4; }
  // In 16-bit types.
  constexpr int bytes_in_flight() const {
    return block_threads * min_blocks * tensors * unit() * 2;
  }
};

// Memory-bound: 4.2 TB/s and 800 ns want 26 KB under way on a multiprocessor. Registers limit the
// threads: a unit is 16 of them in fp32, cos and sin are 16 more, and so are sums of dweight; the
// backward's x is 16 in fp32 and 8 else.
//                                                threads piece tensors blocks
inline constexpr RopeConfig kRopeConfig = {256, 8, 1, 4};
inline constexpr RopeConfig kRopeBackwardConfig = {256, 8, 2, 3};
inline constexpr RopeConfig kRopeBackwardFp32Config = {256, 8, 2, 2};
inline constexpr int kRopeMaxNormDim = 2048;  // of heads with a norm

constexpr const RopeConfig& rope_backward_config(int element_bytes) {
  return element_bytes == 4 ? kRopeBackwardFp32Config : kRopeBackwardConfig;
}

constexpr bool fits(const RopeConfig& c) {
  return c.bytes_in_flight() >= 26 * 1024 && c.smem_bytes(32, kRopeMaxNormDim) <= 99 * 1024 &&
         c.smem_bytes(1, c.unit()) * c.min_blocks <= 99 * 1024;
}
static_assert(fits(kRopeConfig) && fits(kRopeBackwardConfig) && fits(kRopeBackwardFp32Config));

}  // namespace flashbpt::sm80
