#include "blockwise_positions.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/searchsorted.h>

#include <cmath>

#include "check.h"

namespace flashbpt {

BlockPositions::BlockPositions(const BlockInputs& inputs, const BlockConfig& config,
                               const BlockRows& rows, int64_t dim, const at::TensorOptions& options)
    : in_(inputs), c_(config), dim_(dim), options_(options) {
  if (!rows.packed) return;
  const at::Tensor cu = inputs.cu_seqlens->to(at::kLong);
  const at::Tensor token = at::arange(rows.tokens, cu.options());
  padding = (token >= cu[-1]).unsqueeze(1);
  if (!config.rotary) return;
  const at::Tensor sequence = at::searchsorted(cu, token, /*out_int32=*/false, /*right=*/true);
  packed_ = token - cu.index_select(0, (sequence - 1).clamp_min(0));
  packed_.masked_fill_(padding.squeeze(1), 0);
}

Rope BlockPositions::rope(const BlockGroup& group, const RowBlock& block) const {
  if (!c_.rotary) return {{}, {}, false};
  const at::Tensor positions =
      packed_.defined() ? packed_.narrow(0, block.begin, block.count)
                        : at::arange(block.begin, block.end(), options_.dtype(at::kLong));
  const auto acc = accumulation_dtype(c10::typeMetaToScalarType(options_.dtype()));
  at::Tensor cos, sin;
  if (in_.cos) {
    cos = rows_of(*in_.cos, positions).to(acc);
    sin = rows_of(*in_.sin, positions).to(acc);
  } else {
    // In fp64: positions go to millions.
    const auto doubles = options_.dtype(at::kDouble);
    const at::Tensor frequency =
        at::pow(c_.rope_theta, at::arange(dim_ / 2, doubles) * (-2.0 / static_cast<double>(dim_)));
    const at::Tensor angle = at::outer(positions.to(at::kDouble), frequency);
    cos = angle.cos().to(acc);
    sin = angle.sin().to(acc);
  }
  if (group.sequences > 1) {
    cos = cos.repeat({group.sequences, 1});
    sin = sin.repeat({group.sequences, 1});
  }
  return {cos.contiguous(), sin.contiguous(), c_.interleaved};
}

// NaN where a packed sequence is longer than the table, which the host cannot know.
at::Tensor BlockPositions::rows_of(const at::Tensor& table, const at::Tensor& positions) const {
  const int64_t last = table.size(0) - 1;
  const at::Tensor rows = table.index_select(0, positions.clamp_max(last));
  return packed_.defined() ? rows.masked_fill((positions > last).unsqueeze(1), NAN) : rows;
}

}  // namespace flashbpt
