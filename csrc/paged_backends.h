// What a backend of paged attention implements; paged.cpp picks one.
#pragma once

#include "paged_call.h"

namespace flashbpt {

// Why sm80 does not serve a call; null where it does.
const char* refuse_paged_sm80(const PagedCall& call);
// The kernel that serves a call, by name; that of prefill where requests may have many rows.
const char* paged_kernel_sm80(const PagedCall& call);
// Fills out and lse, which the call's params show, whatever they hold.
void paged_attention_sm80(const PagedCall& call, const at::Tensor& out, const at::Tensor& lse);

// Requests of up to paged_decode_rows rows are decoded, others prefilled. Whether there may be
// others: a hint may say there are none.
int64_t paged_decode_rows(const PagedParams& p);
bool has_prefill(const PagedParams& p);
// Decodes; prefilled: others than those of few rows are left alone.
void paged_decode_sm80(const PagedCall& call, bool prefilled);

// Hopper's prefill, and sm80's decoding beside it.
const char* refuse_paged_sm90(const PagedCall& call);
const char* paged_kernel_sm90(const PagedCall& call);
void paged_attention_sm90(const PagedCall& call);

// Of checked arguments on a GPU.
void append_paged_kv_sm80(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache,
                          const at::Tensor& v_cache, const at::Tensor& slot_mapping,
                          const AppendOptions& options);

}  // namespace flashbpt
