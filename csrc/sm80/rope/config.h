// The numbers of the rope kernels.
#pragma once

namespace flashbpt::sm80 {

struct RopeConfig {
  int block_threads;
  int piece;       // columns; a thread has two pieces of a head, which turn together
  int heads_16;    // that a thread has at once, of 16-bit elements; one of fp32
  int tensors;     // that are read
  int min_blocks;  // a multiprocessor holds at least so many: the register budget

  constexpr int heads(int element_bytes) const { return element_bytes == 2 ? heads_16 : 1; }
  constexpr int unit() const { return 2 * piece; }
  constexpr int max_dim() const { return 32 * unit(); }  // wider heads go element by element
  // Sums of dweight, of each group of lanes that shares a head.
  constexpr int smem_bytes(int lanes, int dim) const { return block_threads / lanes * dim * 4; }
  // In 16-bit types.
  constexpr int bytes_in_flight() const {
    return block_threads * min_blocks * heads_16 * tensors * unit() * 2;
  }
};

// Memory-bound: 4.2 TB/s and 800 ns want 26 KB under way on a multiprocessor, more where a norm's
// sums come between loads and stores. Registers limit the threads: a unit is 16 of them in fp32 and
// 8 else, cos and sin are 16 more, and so are sums of dweight.
//                                     threads piece heads tensors blocks
inline constexpr RopeConfig kRopeConfig = {128, 8, 4, 1, 5};
inline constexpr RopeConfig kRopeBackwardConfig = {128, 8, 2, 2, 4};
inline constexpr RopeConfig kRopeBackwardFp32Config = {128, 8, 1, 2, 4};
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
