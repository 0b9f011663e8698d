#include "paged_call.h"

#include <cmath>

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>

namespace flashbpt {
namespace {

bool given(const std::optional<at::Tensor>& t) {
  return t.has_value() && t->defined();
}

void check_integers(const char* name, const at::Tensor& t, const at::Tensor& query, int64_t dims) {
  check_same_device(name, t, query);
  TORCH_CHECK(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, "flashbpt: ", name,
              " must be int32 or int64, got ", t.scalar_type());
  TORCH_CHECK(t.dim() == dims, "flashbpt: ", name, " must have ", dims, " dimension",
              dims == 1 ? "" : "s", ", got ", t.sizes());
}

}  // namespace

CacheView cache_view(const char* name, const at::Tensor& cache, const at::Tensor& query,
                     const std::optional<at::Tensor>& scale) {
  check_same_device(name, cache, query);
  TORCH_CHECK(cache.dim() == 4, "flashbpt: ", name, " must be (pages, page_size, heads, dim), got ",
              cache.sizes());
  TORCH_CHECK(cache.scalar_type() == query.scalar_type() || is_fp8(cache), "flashbpt: ", name,
              " must have query's dtype, ", query.scalar_type(),
              ", or be float8_e4m3fn or float8_e5m2, got ", cache.scalar_type());
  TORCH_CHECK(has_unit_columns(cache), "flashbpt: the last dimension of ", name,
              " must have stride 1, got strides ", cache.strides());
  CacheView view{cache.data_ptr(), CacheType::kSame, cache.size(0),
                 cache.stride(0),  cache.stride(1),  cache.stride(2)};
  if (cache.scalar_type() == at::kFloat8_e4m3fn) view.type = CacheType::kFp8E4m3;
  if (cache.scalar_type() == at::kFloat8_e5m2) view.type = CacheType::kFp8E5m2;
  if (given(scale)) {
    check_same_device("key_scale and value_scale", *scale, query);
    TORCH_CHECK(scale->scalar_type() == at::kFloat &&
                    (scale->numel() == 1 || (scale->dim() == 1 && scale->size(0) == cache.size(2))),
                "flashbpt: the scale of ", name, " must be a float32 scalar or (kv heads,) = (",
                cache.size(2), ",), got ", scale->scalar_type(), " ", scale->sizes());
    view.scale = scale->data_ptr<float>();
    view.scale_stride = scale->numel() == 1 ? 0 : scale->stride(0);
  }
  return view;
}

IntegersView integers_view(const char* name, const at::Tensor& t, const at::Tensor& query,
                           int64_t size) {
  check_integers(name, t, query, 1);
  TORCH_CHECK(size < 0 || t.size(0) == size, "flashbpt: ", name, " must have ", size,
              " elements, got ", t.size(0));
  const int64_t stride = t.size(0) > 1 ? t.stride(0) * t.element_size() : t.element_size();
  TORCH_CHECK(t.size(0) * stride <= INT32_MAX, "flashbpt: ", name, " must lie within 2 GB, got ",
              t.size(0), " elements with a stride of ", t.stride(0));
  return {t.data_ptr(), t.scalar_type() == at::kLong, static_cast<uint32_t>(stride)};
}

PagedCall::PagedCall(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                     const PageTable& table, const PagedOptions& options)
    : table(table), options(options), q(q), k_cache(k_cache), v_cache(v_cache) {
  check_tensors();
  if (!has_unit_columns(q)) this->q = q.contiguous();
  PagedParams& p = params;
  p.tokens = q.size(0);
  p.heads_q = q.size(1);
  p.heads_kv = k_cache.size(2);
  p.dim = q.size(2);
  p.dim_v = v_cache.size(3);
  p.q = {this->q.data_ptr(), data_type(q.scalar_type()), 0,
         this->q.stride(1),  this->q.stride(0),          1};
  p.k = cache_view("key_cache", k_cache, q, options.key_scale);
  p.v = cache_view("value_cache", v_cache, q, options.value_scale);
  set_table();
  set_terms();
}

void PagedCall::check_tensors() const {
  TORCH_CHECK(q.dim() == 3, "flashbpt: query must be (tokens, heads, dim), got ", q.sizes());
  TORCH_CHECK(is_attention_dtype(q.scalar_type()), "flashbpt: query must be float32, bfloat16, ",
              "float16 or float64, got ", q.scalar_type());
  TORCH_CHECK(k_cache.dim() == 4 && v_cache.dim() == 4,
              "flashbpt: key_cache and value_cache must be (pages, page_size, heads, dim), got ",
              k_cache.sizes(), " and ", v_cache.sizes());
  TORCH_CHECK(k_cache.sizes().slice(0, 3) == v_cache.sizes().slice(0, 3),
              "flashbpt: key_cache and value_cache must have the same pages, page size and heads, ",
              "got ", k_cache.sizes(), " and ", v_cache.sizes());
  TORCH_CHECK(k_cache.scalar_type() == v_cache.scalar_type(),
              "flashbpt: key_cache and value_cache must have one dtype, got ",
              k_cache.scalar_type(), " and ", v_cache.scalar_type());
  TORCH_CHECK(k_cache.size(1) > 0, "flashbpt: a page must hold at least one token, got page size ",
              k_cache.size(1));
  TORCH_CHECK(q.size(2) == k_cache.size(3),
              "flashbpt: query and key_cache must have the same head dim, got ", q.size(2), " and ",
              k_cache.size(3));
  const int64_t heads_q = q.size(1), heads_kv = k_cache.size(2);
  TORCH_CHECK(heads_kv > 0 ? heads_q % heads_kv == 0 : heads_q == 0,
              "flashbpt: Number of heads in key and value must divide the number of heads in ",
              "query, but key_cache has ", heads_kv, " and query has ", heads_q);
}

void PagedCall::set_table() {
  PagedParams& p = params;
  PageTableView& view = p.table;
  view.slots = table.slots;
  view.page_size = k_cache.size(1);
  const bool csr = given(table.indptr);
  if (csr) {
    view.entries = integers_view("the indices of the page table", table.entries, q, -1);
    view.indptr = integers_view("indptr", *table.indptr, q, -1);
    TORCH_CHECK(table.indptr->size(0) > 0, "flashbpt: indptr must have batch + 1 elements, got 0");
    p.batch = table.indptr->size(0) - 1;
    view.most_keys = table.entries.size(0) * view.page_size;
  } else {
    check_integers("block_table", table.entries, q, 2);
    TORCH_CHECK(table.entries.size(1) <= 1 || table.entries.stride(1) == 1,
                "flashbpt: the rows of block_table must be contiguous, got strides ",
                table.entries.strides());
    view.entries = {table.entries.data_ptr(), table.entries.scalar_type() == at::kLong,
                    static_cast<uint32_t>(table.entries.element_size())};
    view.row_stride = table.entries.stride(0);
    view.most_keys = table.entries.size(1) * (view.slots ? 1 : view.page_size);
    p.batch = table.entries.size(0);
    if (given(table.rows)) {
      view.rows = integers_view("req_pool_indices", *table.rows, q, -1);
      p.batch = table.rows->size(0);
    }
  }
  if (given(options.seq_lens)) {
    p.table.seq_lens = integers_view("seq_lens", *options.seq_lens, q, p.batch);
  } else {
    TORCH_CHECK(csr && given(table.last_page_len),
                "flashbpt: seq_lens is needed where the page table is not CSR with the lengths of ",
                "the last pages");
    p.table.last_page_len = integers_view("last_page_len", *table.last_page_len, q, p.batch);
  }
  if (given(options.cu_seqlens_q)) {
    p.cu_seqlens_q = integers_view("cu_seqlens_q", *options.cu_seqlens_q, q, p.batch + 1);
    p.max_len_q = options.max_seqlen_q.value_or(0);
  } else {
    TORCH_CHECK(p.tokens == p.batch,
                "flashbpt: without cu_seqlens_q query must have one row a request, got ", p.tokens,
                " rows and ", p.batch, " requests");
    p.max_len_q = 1;
  }
}

void PagedCall::set_terms() {
  PagedParams& p = params;
  p.scale = options.scale.value_or(p.dim > 0 ? 1.0 / std::sqrt(static_cast<double>(p.dim)) : 1.0);
  TORCH_CHECK(options.softcap >= 0.0 && std::isfinite(options.softcap),
              "flashbpt: softcap must be finite and >= 0 (0: none), got ", options.softcap);
  p.softcap = options.softcap;
  TORCH_CHECK(options.window_left >= -1 && options.window_right >= -1,
              "flashbpt: window must be (left, right) with each >= 0, or -1 for no limit, got (",
              options.window_left, ", ", options.window_right, ")");
  const at::ScalarType acc = accumulation_dtype(q.scalar_type());
  const bool tree_given = given(options.tree_mask);
  p.band =
      Band::from_flags(options.causal && !tree_given, options.window_left, options.window_right);
  if (given(options.sinks)) {
    check_same_device("sinks", *options.sinks, q);
    TORCH_CHECK(options.sinks->dim() == 1 && options.sinks->size(0) == p.heads_q,
                "flashbpt: sinks must be (query heads,) = (", p.heads_q, ",), got ",
                options.sinks->sizes());
    sinks = options.sinks->to(acc).contiguous();
    p.sinks = {sinks.data_ptr(), data_type(acc), 0, 1, 0, 0};
  }
  if (given(options.alibi_slopes)) {
    check_same_device("alibi_slopes", *options.alibi_slopes, q);
    const at::Tensor& s = *options.alibi_slopes;
    TORCH_CHECK((s.dim() == 1 && s.size(0) == p.heads_q) ||
                    (s.dim() == 2 && s.size(0) == p.batch && s.size(1) == p.heads_q),
                "flashbpt: alibi_slopes must be (query heads,) or (requests, query heads), got ",
                s.sizes());
    slopes = s.to(acc).contiguous();
    p.alibi = {slopes.data_ptr(), data_type(acc), s.dim() == 2 ? p.heads_q : 0, 1, 0, 0};
  }
  if (tree_given) {
    check_same_device("tree_mask", *options.tree_mask, q);
    TORCH_CHECK(
        options.tree_mask->scalar_type() == at::kBool && options.tree_mask->dim() == 1,
        "flashbpt: tree_mask must be a bool vector, the requests' (rows, rows) squares one ",
        "after the other, got ", options.tree_mask->scalar_type(), " ", options.tree_mask->sizes());
    tree = options.tree_mask->contiguous();
    p.tree = static_cast<const uint8_t*>(tree.data_ptr());
  }
}

at::Tensor PagedCall::empty_out() const {
  return at::empty({params.tokens, params.heads_q, params.dim_v}, q.options());
}

void PagedCall::set_results(const at::Tensor& out, const at::Tensor& lse) {
  check_same_device("out", out, q);
  TORCH_CHECK(out.scalar_type() == q.scalar_type() && out.dim() == 3 &&
                  out.size(0) == params.tokens && out.size(1) == params.heads_q &&
                  out.size(2) == params.dim_v,
              "flashbpt: out must be ", q.scalar_type(), " (", params.tokens, ", ", params.heads_q,
              ", ", params.dim_v, "), got ", out.scalar_type(), " ", out.sizes());
  TORCH_CHECK(has_unit_columns(out), "flashbpt: the last dimension of out must have stride 1, got ",
              "strides ", out.strides());
  at::assert_no_internal_overlap(out);
  params.out = {out.data_ptr(), data_type(out.scalar_type()), 0, out.stride(1), out.stride(0), 1};
  params.lse = {lse.data_ptr(), data_type(lse.scalar_type()), 0, 1, params.heads_q, 0};
}

}  // namespace flashbpt
