#pragma once

#include "../paged_call.h"

namespace flashbpt::cpu {

// Fills out and lse, whatever they hold. Request after request: its keys are gathered, then it is
// a dense call of attention_forward.
void paged_attention(const PagedCall& call, const at::Tensor& out, const at::Tensor& lse);

void append_paged_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache,
                     const at::Tensor& v_cache, const at::Tensor& slot_mapping,
                     const AppendOptions& options);

}  // namespace flashbpt::cpu
