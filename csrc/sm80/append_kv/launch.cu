#include "launch.h"

#include "../../dispatch_element.h"
#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

void launch_append_kv(const AppendKvParams& p, cudaStream_t stream) {
  constexpr AppendKvConfig kConfig = kAppendKvConfig;
  const auto blocks = [&](const AppendRows& rows) {
    const int64_t pieces = (rows.width + kConfig.width - 1) / kConfig.width;
    return (p.tokens * p.heads * pieces + kConfig.block_threads - 1) / kConfig.block_threads;
  };
  const unsigned key_blocks = static_cast<unsigned>(blocks(p.key));
  const unsigned all = key_blocks + static_cast<unsigned>(blocks(p.value));
  if (all == 0) return;
  dispatch_element(p.key.rows.dtype, [&](auto tag) {
    launch_kernel<append_kv_kernel<typename decltype(tag)::Type>>(all, kConfig.block_threads, 0,
                                                                  stream, p, key_blocks);
  });
}

}  // namespace flashbpt::sm80
