#pragma once

#include "../merge_states_params.h"

namespace flashbpt::cpu {

// states: [num_states]; out: [rows, D] and lse: [rows], contiguous.
void merge_states(const MergeShape& shape, const MergeState* states, int64_t num_states, void* out,
                  void* lse);

}  // namespace flashbpt::cpu
