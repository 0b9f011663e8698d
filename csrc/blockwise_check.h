// What a transformer block and its FFN take; refused with a sentence.
#pragma once

#include "blockwise.h"

namespace flashbpt {

void check_block(const BlockInputs& inputs, const BlockTensors& weights, const BlockConfig& config);
void check_ffn_rows(const at::Tensor& x, const FfnWeights& weights);

}  // namespace flashbpt
