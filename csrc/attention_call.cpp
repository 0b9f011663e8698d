#include "attention_call.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <cmath>

namespace flashbpt {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

bool given(const OptionalTensor& t) {
  return t.has_value() && t->defined();
}

void check_floating(const char* name, const at::Tensor& t, const at::Tensor& q) {
  TORCH_CHECK(is_attention_dtype(t.scalar_type()), "flashbpt: ", name,
              " must be float32, bfloat16, "
              "float16 or float64, got ",
              t.scalar_type());
  check_same_device(name, t, q);
}

template <typename Index>
void check_offsets(const char* name, const at::Tensor& t, int64_t tokens) {
  const Index* offsets = t.data_ptr<Index>();
  const int64_t n = t.size(0);
  TORCH_CHECK(offsets[0] == 0, "flashbpt: ", name, " must start at 0, got ", offsets[0]);
  for (int64_t i = 1; i < n; ++i) {
    TORCH_CHECK(offsets[i] >= offsets[i - 1], "flashbpt: ", name, " must not decrease, but entry ",
                i, " is ", offsets[i], " after ", offsets[i - 1]);
  }
  TORCH_CHECK(offsets[n - 1] <= tokens, "flashbpt: ", name, " ends at ", offsets[n - 1],
              ", past the ", tokens, " tokens there are");
}

void check_values(const char* name, const at::Tensor& t, int64_t tokens) {
  const at::Tensor host = t.cpu().contiguous();
  if (host.scalar_type() == at::kLong) return check_offsets<int64_t>(name, host, tokens);
  check_offsets<int32_t>(name, host, tokens);
}

void check_cu_seqlens_tensor(const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, "flashbpt: ", name,
              " must be int32 or int64, got ", t.scalar_type());
  TORCH_CHECK(t.dim() == 1 && t.size(0) >= 1, "flashbpt: ", name,
              " must be a vector of batch + 1 "
              "offsets, got shape ",
              t.sizes());
}

// Sums of a few offsets stay far below Band::kNoLimit.
constexpr int64_t kLargestOffset = Band::kNoLimit / 8;

void check_offset(const char* name, int64_t value, int64_t smallest) {
  TORCH_CHECK(value >= smallest && value <= kLargestOffset, "flashbpt: ", name, " must be from ",
              smallest, " to ", kLargestOffset, ", got ", value);
}

}  // namespace

TensorView broadcast_view(const at::Tensor& t) {
  const auto stride = [&](int64_t d) { return t.size(d) == 1 ? 0 : t.stride(d); };
  return {t.data_ptr(), data_type(t.scalar_type()), stride(0), stride(1), stride(2), stride(3)};
}

void set_dropout(AttentionParams& params, double p) {
  TORCH_CHECK(p >= 0.0 && p <= 1.0,
              "flashbpt: dropout probability has to be between 0 and 1, but got ", p);
  params.dropout_threshold = static_cast<uint64_t>(std::ceil(p * 4294967296.0));
  params.dropout_scale = params.drops_all() ? 0.0 : 1.0 / (1.0 - p);
}

void set_rng_state(AttentionParams& params, const OptionalTensor& rng_state,
                   const at::Tensor& query) {
  if (params.dropout_threshold == 0) return;
  TORCH_CHECK(
      given(rng_state),
      "flashbpt: dropout needs rng_state (int64 [2], see flashbpt::draw_rng_state), got none");
  check_same_device("rng_state", *rng_state, query);
  TORCH_CHECK(rng_state->scalar_type() == at::kLong && rng_state->numel() == 2 &&
                  rng_state->is_contiguous(),
              "flashbpt: rng_state must be a contiguous int64 tensor of 2 elements, got ",
              rng_state->scalar_type(), " ", rng_state->sizes());
  TORCH_CHECK((params.packed() || params.q_offset % 16 == 0) && params.k_offset % 16 == 0,
              "flashbpt: with dropout q_offset and k_offset must be multiples of 16, got ",
              params.q_offset, " and ", params.k_offset);
  params.rng_state = rng_state->data_ptr<int64_t>();
}

AttentionCall::AttentionCall(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionOptions& options)
    : options(options), q(q), k(k), v(v), acc(accumulation_dtype(q.scalar_type())) {
  check_tensors();
  AttentionParams& p = params;
  const bool packed = given(options.cu_seqlens_q);
  if (packed) check_cu_seqlens_tensor("cu_seqlens_q", *options.cu_seqlens_q);
  p.batch = packed ? options.cu_seqlens_q->size(0) - 1 : q.size(0);
  p.heads_q = q.size(1);
  p.heads_kv = k.size(1);
  p.len_q = packed ? q.size(0) : q.size(2);
  p.len_k = packed ? k.size(0) : k.size(2);
  p.dim = q.size(-1);
  p.dim_v = v.size(-1);
  TORCH_CHECK(
      p.heads_kv > 0 ? p.heads_q % p.heads_kv == 0 : p.heads_q == 0,
      "flashbpt: Number of heads in key and value must divide the number of heads in query, "
      "but key has ",
      p.heads_kv, " and query has ", p.heads_q);
  if (packed) set_sequences();
  p.q = view(q);
  p.k = view(k);
  p.v = view(v);
  p.scale = options.scale.value_or(p.dim > 0 ? 1.0 / std::sqrt(static_cast<double>(p.dim)) : 1.0);
  TORCH_CHECK(options.softcap >= 0.0 && std::isfinite(options.softcap),
              "flashbpt: softcap must be "
              "finite and >= 0 (0: none), got ",
              options.softcap);
  p.softcap = options.softcap;
  TORCH_CHECK(options.window_left >= -1 && options.window_right >= -1,
              "flashbpt: window must be "
              "(left, right) with each >= 0, or -1 for no limit, got (",
              options.window_left, ", ", options.window_right, ")");
  p.band = Band::from_flags(options.causal, options.window_left, options.window_right);
  p.diagonal = options.diagonal;
  const int64_t total_heads = options.total_heads > 0 ? options.total_heads : p.heads_q;
  TORCH_CHECK(options.head_offset >= 0 && options.head_offset + p.heads_q <= total_heads,
              "flashbpt: head_offset + heads must not exceed total_heads, got ",
              options.head_offset, " + ", p.heads_q, " and ", total_heads);
  check_offset("q_offset", options.q_offset, 0);
  check_offset("k_offset", options.k_offset, 0);
  check_offset("batch_offset", options.batch_offset, 0);
  check_offset("diagonal", options.diagonal, -kLargestOffset);
  p.q_offset = options.q_offset;
  p.k_offset = options.k_offset;
  p.batch_offset = options.batch_offset;
  p.head_offset = options.head_offset;
  p.total_heads = total_heads;
  set_dropout(p, options.dropout_p);
  if (given(options.mask)) set_mask();
  set_sinks_and_slopes();
}

void AttentionCall::check_tensors() const {
  const int64_t rank = given(options.cu_seqlens_q) ? 3 : 4;
  TORCH_CHECK(q.dim() == rank && k.dim() == rank && v.dim() == rank,
              "flashbpt: query, key and "
              "value must be ",
              rank == 3 ? "(tokens, heads, dim)" : "(batch, heads, length, dim)", ", got ",
              q.sizes(), ", ", k.sizes(), " and ", v.sizes());
  TORCH_CHECK(
      q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(),
      "flashbpt: Expected query, key, and value to have the same dtype, but got query.dtype: ",
      q.scalar_type(), " key.dtype: ", k.scalar_type(), " and value.dtype: ", v.scalar_type(),
      " instead.");
  check_floating("query", q, q);
  check_same_device("key", k, q);
  check_same_device("value", v, q);
  TORCH_CHECK(q.size(-1) == k.size(-1), "flashbpt: query and key must have the same head dim, got ",
              q.size(-1), " and ", k.size(-1));
  const int64_t rows = rank == 3 ? 0 : 2;
  TORCH_CHECK(k.size(rows) == v.size(rows),
              "flashbpt: key and value must have the same length, got ", k.size(rows), " and ",
              v.size(rows));
  TORCH_CHECK(k.size(1) == v.size(1),
              "flashbpt: key and value must have the same number of heads, "
              "got ",
              k.size(1), " and ", v.size(1));
  TORCH_CHECK(rank == 3 || (q.size(0) == k.size(0) && q.size(0) == v.size(0)),
              "flashbpt: query, key and value must have the same batch size, got ", q.size(0), ", ",
              k.size(0), " and ", v.size(0));
}

void AttentionCall::set_sequences() {
  TORCH_CHECK(given(options.cu_seqlens_k), "flashbpt: cu_seqlens_q needs cu_seqlens_k, got none");
  at::Tensor& cu_q = *options.cu_seqlens_q;
  at::Tensor& cu_k = *options.cu_seqlens_k;
  check_cu_seqlens_tensor("cu_seqlens_k", cu_k);
  check_same_device("cu_seqlens_q", cu_q, q);
  check_same_device("cu_seqlens_k", cu_k, q);
  TORCH_CHECK(cu_q.size(0) == cu_k.size(0),
              "flashbpt: cu_seqlens_q and cu_seqlens_k must name the "
              "same number of sequences, got ",
              cu_q.size(0) - 1, " and ", cu_k.size(0) - 1);
  TORCH_CHECK(!given(options.mask), "flashbpt: packed sequences take no attn_mask");
  TORCH_CHECK(options.k_offset == 0 && options.diagonal == 0,
              "flashbpt: packed sequences take no "
              "k_offset and no diagonal, got ",
              options.k_offset, " and ", options.diagonal);
  if (cu_q.scalar_type() != cu_k.scalar_type()) {
    cu_q = cu_q.to(at::kLong);
    cu_k = cu_k.to(at::kLong);
  }
  cu_q = cu_q.contiguous();
  cu_k = cu_k.contiguous();
  if (q.is_cpu()) {
    // q may be a block of the rows that cu_seqlens_q describes.
    check_values("cu_seqlens_q", cu_q, INT64_MAX);
    check_values("cu_seqlens_k", cu_k, k.size(0));
  }
  params.cu_seqlens_q = cu_q.data_ptr();
  params.cu_seqlens_k = cu_k.data_ptr();
  params.cu_seqlens_int64 = cu_q.scalar_type() == at::kLong;
}

void AttentionCall::prepare_launch() {
  set_rng_state(params, options.rng_state, q);
  if (packed() && params.dropout_threshold > 0 && q.is_cpu()) check_packed_block();
}

// A block of packed rows may cut a sequence only where the words of dropout start anew.
void AttentionCall::check_packed_block() const {
  const at::Tensor cu = options.cu_seqlens_q->to(at::kLong);
  const int64_t* begin = cu.data_ptr<int64_t>();
  for (int64_t b = 0; b < params.batch; ++b) {
    for (const int64_t cut : {params.q_offset, params.q_offset + params.len_q}) {
      TORCH_CHECK(cut <= begin[b] || cut >= begin[b + 1] || (cut - begin[b]) % 16 == 0,
                  "flashbpt: with dropout a block of packed rows must cut a sequence at a "
                  "multiple of 16, but it cuts sequence ",
                  b, " at row ", cut - begin[b]);
    }
  }
}

void AttentionCall::set_mask() {
  const at::Tensor& mask = *options.mask;
  check_same_device("attn_mask", mask, q);
  const at::ScalarType t = mask.scalar_type();
  TORCH_CHECK(t == at::kBool || t == at::kFloat || t == q.scalar_type(),
              "flashbpt: Expected "
              "attn_mask dtype to be bool or float or to match query dtype, but got "
              "attn_mask.dtype: ",
              t, " and query.dtype: ", q.scalar_type(), " instead.");
  const AttentionParams& p = params;
  const std::array<int64_t, 4> full{p.batch, p.heads_q, p.len_q, p.len_k};
  bool fits = mask.dim() == 4;
  for (int64_t d = 0; fits && d < 4; ++d) fits = mask.size(d) == 1 || mask.size(d) == full[d];
  TORCH_CHECK(fits, "flashbpt: attn_mask of shape ", mask.sizes(),
              " does not broadcast to the "
              "scores (batch, heads, len_q, len_k) = ",
              at::IntArrayRef(full));
  params.mask = broadcast_view(mask);
}

void AttentionCall::set_sinks_and_slopes() {
  AttentionParams& p = params;
  if (given(options.sinks)) {
    check_floating("sinks", *options.sinks, q);
    TORCH_CHECK(options.sinks->dim() == 1 && options.sinks->size(0) == p.heads_q,
                "flashbpt: sinks "
                "must hold one logit a query head, (",
                p.heads_q, ",), got shape ", options.sinks->sizes());
    sinks = options.sinks->to(acc).contiguous();
    p.sinks = {sinks.data_ptr(), data_type(acc), 0, 1, 0, 0};
  }
  if (given(options.alibi_slopes)) {
    const at::Tensor& t = *options.alibi_slopes;
    check_floating("alibi_slopes", t, q);
    const bool per_batch = t.dim() == 2;
    TORCH_CHECK((t.dim() == 1 || (per_batch && t.size(0) == p.batch)) && t.size(-1) == p.heads_q,
                "flashbpt: alibi_slopes must be (", p.heads_q, ",) or (", p.batch, ", ", p.heads_q,
                "), got shape ", t.sizes());
    slopes = t.to(acc).contiguous();
    p.alibi = {slopes.data_ptr(), data_type(acc), per_batch ? p.heads_q : 0, 1, 0, 0};
  }
}

bool AttentionCall::has_empty_dimension() const {
  const AttentionParams& p = params;
  return p.batch == 0 || p.heads_q == 0 || p.len_q == 0 || (p.len_k == 0 && !packed()) ||
         p.dim == 0 || p.dim_v == 0;
}

bool AttentionCall::has_additive_mask() const {
  return given(options.mask) && options.mask->scalar_type() != at::kBool;
}

bool AttentionCall::has_boolean_mask() const {
  return given(options.mask) && options.mask->scalar_type() == at::kBool;
}

bool AttentionCall::has_sinks() const {
  return given(options.sinks);
}

bool AttentionCall::has_alibi() const {
  return given(options.alibi_slopes);
}

TensorView AttentionCall::view(const at::Tensor& t) const {
  const DataType dtype = data_type(t.scalar_type());
  if (packed()) return {t.data_ptr(), dtype, 0, t.stride(1), t.stride(0), t.stride(2)};
  return {t.data_ptr(), dtype, t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

TensorView AttentionCall::lse_view(const at::Tensor& t) const {
  const DataType dtype = data_type(t.scalar_type());
  if (packed()) return {t.data_ptr(), dtype, 0, t.stride(1), t.stride(0), 0};
  return {t.data_ptr(), dtype, t.stride(0), t.stride(1), t.stride(2), 0};
}

void AttentionCall::check_saved(const at::Tensor& grad_out, const OptionalTensor& grad_lse,
                                const AttentionSaved& saved) const {
  std::vector<int64_t> out = q.sizes().vec();
  out.back() = params.dim_v;
  const std::vector<int64_t> lse(out.begin(), out.end() - 1);
  const auto check = [&](const char* name, const at::Tensor& t, at::IntArrayRef sizes,
                         at::ScalarType dtype) {
    check_same_device(name, t, q);
    TORCH_CHECK(t.sizes() == sizes && t.scalar_type() == dtype, "flashbpt: ", name, " must be ",
                dtype, " of shape ", sizes, ", got ", t.scalar_type(), " of shape ", t.sizes());
  };
  check("grad_out", grad_out, out, q.scalar_type());
  check("out", saved.out, out, q.scalar_type());
  check("lse", saved.lse, lse, acc);
  if (given(grad_lse)) check("grad_lse", *grad_lse, lse, acc);
  if (given(saved.lse_lo) && saved.lse_lo->numel() > 0) check("lse_lo", *saved.lse_lo, lse, acc);
}

void AttentionCall::check_accumulator(const char* name, const at::Tensor& t,
                                      const at::Tensor& like) const {
  check_same_device(name, t, q);
  at::assert_no_internal_overlap(t);
  at::assert_no_overlap(t, like);
  TORCH_CHECK(t.sizes() == like.sizes() && t.scalar_type() == acc, "flashbpt: ", name, " must be ",
              acc, " of shape ", like.sizes(), ", got ", t.scalar_type(), " of shape ", t.sizes());
}

at::Tensor check_cu_seqlens(const at::Tensor& cu_seqlens, int64_t tokens, c10::string_view name) {
  const std::string text(name);
  check_cu_seqlens_tensor(text.c_str(), cu_seqlens);
  check_values(text.c_str(), cu_seqlens, tokens);
  return cu_seqlens.clone(at::MemoryFormat::Contiguous);
}

}  // namespace flashbpt
