// keep[b, h, q, k] = word(b, h, q, k) >= threshold
//
// Who does what: a block owns a row, its threads the keys, and each draws the four words that share
// a call of Philox to keep one of them. It serves tests and the aten backend, not the kernels of
// attention, which draw their own words.
//
// Barriers: none.
//
// The layout of the words: attention/philox.h
#pragma once

#include "../../attention/philox.h"
#include "../../ptx/grid.h"
#include "launch.h"

namespace flashbpt::sm80 {

constexpr int kDropoutMaskThreads = 256;

__global__ void __launch_bounds__(kDropoutMaskThreads)
    dropout_mask_kernel(const AttentionParams p, bool* __restrict__ keep) {
  ptx::follow_earlier_grids();
  const uint64_t seed = p.rng_state[0], offset = p.rng_state[1];
  const int64_t rows = p.batch * p.heads_q * p.len_q;
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
    const int64_t plane = i / p.len_q, batch = plane / p.heads_q, head = plane % p.heads_q;
    const uint32_t batch_head =
        static_cast<uint32_t>((batch + p.batch_offset) * p.total_heads + head + p.head_offset);
    const uint32_t q = static_cast<uint32_t>(i % p.len_q + p.q_offset);
    for (int64_t j = threadIdx.x; j < p.len_k; j += kDropoutMaskThreads) {
      const uint32_t k = static_cast<uint32_t>(j + p.k_offset);
      const PhiloxWords words = dropout_words(seed, offset, batch_head, q, k);
      // An index into the words would put them into local memory.
      const uint32_t low = k / 8 % 2 ? words.word[1] : words.word[0];
      const uint32_t high = k / 8 % 2 ? words.word[3] : words.word[2];
      keep[i * p.len_k + j] = (q / 8 % 2 ? high : low) >= p.dropout_threshold;
    }
  }
}

}  // namespace flashbpt::sm80
