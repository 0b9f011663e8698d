#include "launch.h"

#include <algorithm>

#include "../dispatch_element.h"
#include "../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

void launch_paged_merge(const PagedDecodeParams& p, const DeviceLimits& device,
                        cudaStream_t stream) {
  if (p.schedule.teams == 1) return;  // nothing is split
  // At most so many items are split, with so many rows each; of pieces what fills a wave.
  const int64_t tile = p.schedule.tile_rows, group = p.group();
  const int64_t items =
      p.cu_seqlens_q ? p.tokens * group / tile + p.batch : p.batch * ceil_div(group, tile);
  const int64_t most_rows = std::min(p.cu_seqlens_q ? p.tokens * group : group, tile);
  const int64_t splits = std::min<int64_t>(items, p.schedule.teams);
  const int64_t wave = int64_t{device.multiprocessors} * kPagedMergeConfig.min_blocks;
  const int64_t pieces =
      most_rows * std::max<int64_t>(ceil_div(p.dim_v, PagedMergeConfig::kColumns), 1);
  const dim3 grid(
      static_cast<unsigned>(splits),
      static_cast<unsigned>(std::clamp<int64_t>(wave / (splits * p.heads_kv), 1, pieces)),
      static_cast<unsigned>(p.heads_kv));
  dispatch_element(p.q.dtype, [&](auto tag) {
    constexpr auto kKernel = paged_merge_kernel<typename decltype(tag)::Type>;
    launch_kernel<kKernel>(grid, kPagedMergeConfig.threads(), 0, stream, p);
  });
}

}  // namespace flashbpt::sm80
