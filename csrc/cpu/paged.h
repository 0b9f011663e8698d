#pragma once

#include "../paged_call.h"

namespace flashbpt::cpu {

// Fills out and lse, whatever they hold. Request after request: its keys are gathered, then it is
// a dense call of attention_forward.
void paged_attention(const PagedCall& call, const at::Tensor& out, const at::Tensor& lse);

// Throws where paged_attention would for what the page table, lengths and cu_seqlens_q hold.
void check_requests(const PagedCall& call);

void append_paged_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache,
                     const at::Tensor& v_cache, const at::Tensor& slot_mapping,
                     const AppendOptions& options);

}  // namespace flashbpt::cpu
