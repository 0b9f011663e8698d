// The functions between the matrix products of a feed-forward layer, numbered as ops pass them.
#pragma once

#include <cstdint>

namespace flashbpt {

enum class Activation : int64_t { kSilu, kGelu, kGeluTanh, kRelu };

}  // namespace flashbpt
