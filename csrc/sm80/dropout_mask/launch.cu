#include "launch.h"

#include <algorithm>

#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

void launch_dropout_mask(const AttentionParams& p, bool* keep, cudaStream_t stream) {
  const int64_t rows = p.batch * p.heads_q * p.len_q;
  const int64_t blocks = std::min<int64_t>(rows, INT32_MAX);
  launch_kernel<dropout_mask_kernel>(blocks, kDropoutMaskThreads, 0, stream, p, keep);
}

}  // namespace flashbpt::sm80
