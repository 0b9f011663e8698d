// Words of device memory by which the blocks of one kernel agree.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>

namespace flashbpt {

// Each kind is for one kernel alone, which relies on how it has left them.
struct StreamWords {
  static constexpr int64_t kBarriers = 4096, kCounters = 32;  // 32: a cache line of their own

  int32_t* barriers;  // of sm80/paged_decode (parts.h): zero at first, then but for their top bits
  int32_t* counters;  // of sm90/attn_fwd: zero between kernels
};

// Kernels on one stream share them, since they run one after the other. What a graph captures has
// its own for as long as the graph lives, since it may run beside anything else; launches of one
// graph, from one executable or several, must not overlap, nor may clones of it as branches of
// another.
StreamWords stream_words(c10::cuda::CUDAStream stream);

}  // namespace flashbpt
