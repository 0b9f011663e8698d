#include "launch.h"

#include "../../launch_kernel.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

void launch_add_partials(const AddPartialsParams& p, cudaStream_t stream) {
  constexpr AddPartialsConfig kConfig = kAddPartialsConfig;
  if (p.totals[0] == nullptr && p.totals[1] == nullptr) return;
  const unsigned blocks = (p.width + kConfig.columns - 1) / kConfig.columns;
  launch_kernel<add_partials_kernel>({blocks, p.totals[1] == nullptr ? 1u : 2u},
                                     dim3(kConfig.columns, kConfig.row_groups), 0, stream, p);
}

}  // namespace flashbpt::sm80
