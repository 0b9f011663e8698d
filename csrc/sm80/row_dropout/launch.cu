#include "launch.h"

#include "../../dispatch_element.h"
#include "../../launch_kernel.h"
#include "../whole_vectors.h"
#include "kernel.cuh"

namespace flashbpt::sm80 {

void launch_row_dropout(RowDropoutParams p, cudaStream_t stream) {
  constexpr RowDropoutConfig kConfig = kRowDropoutConfig;
  p.vectorised =
      whole_vectors({p.x, p.bias, p.residual, p.out}, int64_t{p.width} * element_bytes(p.dtype));
  p.pieces = Divisor((p.width + kConfig.width - 1) / kConfig.width);
  const int64_t threads = p.rows * p.pieces.value();
  const int64_t blocks = (threads + kConfig.block_threads - 1) / kConfig.block_threads;
  dispatch_element(p.dtype, [&](auto tag) {
    launch_kernel<row_dropout_kernel<typename decltype(tag)::Type>>(blocks, kConfig.block_threads,
                                                                    0, stream, p);
  });
}

}  // namespace flashbpt::sm80
