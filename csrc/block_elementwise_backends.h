// Who computes what block_elementwise.h declares: ATen's operations (the CPU, and fp64 on CUDA), or
// kernels of sm80.
#pragma once

#include "block_elementwise.h"

namespace flashbpt {

struct RowBackend {
  decltype(&flashbpt::norm_forward) norm_forward;
  decltype(&flashbpt::norm_backward) norm_backward;
  decltype(&flashbpt::rope_forward) rope_forward;
  decltype(&flashbpt::rope_backward) rope_backward;
  decltype(&flashbpt::activation_forward) activation_forward;
  decltype(&flashbpt::activation_backward) activation_backward;
  decltype(&flashbpt::residual_forward) residual_forward;
  decltype(&flashbpt::dropout_backward) dropout_backward;
};

extern const RowBackend kAtenRows;
extern const RowBackend kSm80Rows;  // empty in a build without CUDA

}  // namespace flashbpt
