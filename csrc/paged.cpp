// Host side of the ops over paged caches: check, choose the kernel, launch.
#include "paged.h"

#include <cmath>

#include <ATen/ops/empty.h>

#include "backend.h"
#include "cpu/paged.h"
#include "paged_backends.h"
#include "paged_call.h"

namespace flashbpt {
namespace {

// Why a backend does not serve a call; null where it does.
const char* refusal(const PagedCall& call, Backend backend) {
  const auto forced = static_cast<Backend>(call.options.backend);
  if (forced != Backend::kAuto && forced != backend) return "use_backend forces another one";
  if (backend == Backend::kCpu) return call.q.is_cpu() ? nullptr : "the tensors are not on the CPU";
  if (backend == Backend::kAten) return "it does not read paged caches";
  if (!call.q.is_cuda()) return "the tensors are not on a GPU";
  return backend == Backend::kSm80 ? refuse_paged_sm80(call) : refuse_paged_sm90(call);
}

at::Tensor run(PagedCall& call, const at::Tensor& out) {
  const at::Tensor lse =
      at::empty({call.params.tokens, call.params.heads_q},
                call.q.options().dtype(accumulation_dtype(call.q.scalar_type())));
  call.set_results(out, lse);
  const Backend backend =
      choose_backend(call.q.device(), [&](Backend candidate) { return refusal(call, candidate); });
  if (call.params.batch == 0) {
    out.zero_();
    lse.fill_(-INFINITY);
  } else if (backend == Backend::kCpu) {
    cpu::paged_attention(call, out, lse);
  } else if (backend == Backend::kSm90) {
    paged_attention_sm90(call);
  } else {
    paged_attention_sm80(call, out, lse);
  }
  return lse;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> paged_attention(const at::Tensor& q, const at::Tensor& k_cache,
                                                   const at::Tensor& v_cache,
                                                   const PageTable& table,
                                                   const PagedOptions& options) {
  PagedCall call(q, k_cache, v_cache, table, options);
  const at::Tensor out = call.empty_out();
  return {out, run(call, out)};
}

std::string paged_attention_kernel(const at::Tensor& q, const at::Tensor& k_cache,
                                   const at::Tensor& v_cache, const PageTable& table,
                                   const PagedOptions& options) {
  const PagedCall call(q, k_cache, v_cache, table, options);
  return describe_backends([&](Backend backend) { return refusal(call, backend); },
                           [&](Backend backend) {
                             return std::string(backend == Backend::kSm90 ? paged_kernel_sm90(call)
                                                : backend == Backend::kSm80
                                                    ? paged_kernel_sm80(call)
                                                    : "");
                           });
}

at::Tensor paged_attention_out(const at::Tensor& q, const at::Tensor& k_cache,
                               const at::Tensor& v_cache, const PageTable& table,
                               const PagedOptions& options, const at::Tensor& out) {
  PagedCall call(q, k_cache, v_cache, table, options);
  return run(call, out);
}

void check_paged_attention(const at::Tensor& q, const at::Tensor& k_cache,
                           const at::Tensor& v_cache, const PageTable& table,
                           const PagedOptions& options) {
  // Of query and the caches only the shapes are asked for.
  const auto shape = [](const at::Tensor& t) {
    TORCH_CHECK(t.dim() > 0, "flashbpt: query and the caches must have dimensions, got a scalar");
    return at::empty({t.size(-1)}, t.options().device(at::kCPU)).expand(t.sizes());
  };
  const auto host = [](const std::optional<at::Tensor>& t) -> std::optional<at::Tensor> {
    if (!t.has_value()) return std::nullopt;
    return t->cpu();
  };
  const PageTable table_on_host = {table.entries.cpu(), host(table.rows), host(table.indptr),
                                   host(table.last_page_len), table.slots};
  PagedOptions contents{};
  contents.seq_lens = host(options.seq_lens);
  contents.cu_seqlens_q = host(options.cu_seqlens_q);
  contents.causal = options.causal;
  contents.window_left = options.window_left, contents.window_right = options.window_right;
  cpu::check_requests(PagedCall(shape(q), shape(k_cache), shape(v_cache), table_on_host, contents));
}

void append_paged_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache,
                     const at::Tensor& v_cache, const at::Tensor& slot_mapping,
                     const AppendOptions& options) {
  TORCH_CHECK(key.dim() == 3 && value.dim() == 3,
              "flashbpt: key and value must be (tokens, heads, dim), got ", key.sizes(), " and ",
              value.sizes());
  TORCH_CHECK(
      is_attention_dtype(key.scalar_type()) && key.scalar_type() == value.scalar_type(),
      "flashbpt: key and value must have one dtype, float32, bfloat16, float16 or float64, ",
      "got ", key.scalar_type(), " and ", value.scalar_type());
  check_same_device("value", value, key);
  cache_view("key_cache", k_cache, key, options.key_scale);  // for its checks
  cache_view("value_cache", v_cache, key, options.value_scale);
  const auto fits = [](const at::Tensor& rows, const at::Tensor& cache) {
    return rows.size(1) == cache.size(2) && rows.size(2) == cache.size(3);
  };
  TORCH_CHECK(fits(key, k_cache) && fits(value, v_cache),
              "flashbpt: key and value must have the heads and widths of their caches, got ",
              key.sizes(), " for ", k_cache.sizes(), " and ", value.sizes(), " for ",
              v_cache.sizes());
  TORCH_CHECK(k_cache.size(0) == v_cache.size(0) && k_cache.size(1) == v_cache.size(1),
              "flashbpt: key_cache and value_cache must have the same pages and page size, got ",
              k_cache.sizes(), " and ", v_cache.sizes());
  const int64_t tokens = key.size(0);
  TORCH_CHECK(value.size(0) == tokens, "flashbpt: key and value must have the same tokens, got ",
              tokens, " and ", value.size(0));
  integers_view("slot_mapping", slot_mapping, key, tokens);
  TORCH_CHECK(options.cos.has_value() == options.sin.has_value(),
              "flashbpt: cos and sin come together or not at all");
  if (options.cos) {
    for (const at::Tensor* t : {&*options.cos, &*options.sin}) {
      check_same_device("cos and sin", *t, key);
      TORCH_CHECK(t->dim() == 2 && t->sizes() == options.cos->sizes() && t->is_floating_point() &&
                      2 * t->size(1) <= key.size(2),
                  "flashbpt: cos and sin must be (positions, at most half of the head dim ",
                  key.size(2), "), got ", options.cos->sizes(), " and ", options.sin->sizes());
    }
    if (options.positions) integers_view("positions", *options.positions, key, tokens);
    TORCH_CHECK(options.positions || options.cos->size(0) == tokens,
                "flashbpt: without positions cos and sin must have a row a token, got ",
                options.cos->size(0), " rows and ", tokens, " tokens");
  }
  if (key.is_cpu())
    cpu::append_paged_kv(key, value, k_cache, v_cache, slot_mapping, options);
  else
    append_paged_kv_sm80(key, value, k_cache, v_cache, slot_mapping, options);
}

void check_slot_mapping(const at::Tensor& slot_mapping, int64_t slots) {
  const int64_t last = slot_mapping.numel() > 0 ? slot_mapping.max().item<int64_t>() : -1;
  TORCH_CHECK(last < slots, "flashbpt: slot_mapping must be below the ", slots,
              " slots of the cache, or negative to skip a row, got ", last);
}

}  // namespace flashbpt
