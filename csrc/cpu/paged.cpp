#include "paged.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "../attention.h"

namespace flashbpt::cpu {
namespace {

// Rows of a cache by their slots, [slots, heads, width]; fp8 as it is stored.
at::Tensor gather(const at::Tensor& cache, const at::Tensor& slots) {
  const at::Tensor bytes = is_fp8(cache) ? cache.view(at::kByte) : cache;
  const at::Tensor rows =
      bytes.index({slots.div(cache.size(1), "floor"), slots.remainder(cache.size(1))});
  return is_fp8(cache) ? rows.view(cache.scalar_type()) : rows;
}

// What the elements stand for.
at::Tensor scaled(const at::Tensor& rows, const std::optional<at::Tensor>& scale) {
  if (!scale.has_value()) return rows;
  return rows * (scale->numel() == 1 ? scale->reshape({1, 1, 1}) : scale->reshape({1, -1, 1}));
}

struct Request {
  int64_t index, row_begin, rows, length;
};

Request checked_request(const PagedCall& call, int64_t b) {
  const PagedParams& p = call.params;
  const int64_t begin = p.cu_seqlens_q ? p.cu_seqlens_q[b] : b;
  const int64_t end = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] : b + 1;
  TORCH_CHECK(begin >= 0 && begin <= end && end <= p.tokens && (b > 0 || begin == 0),
              "flashbpt: cu_seqlens_q must start at 0, not decrease and end within the ", p.tokens,
              " rows of query, but request ", b, " has rows [", begin, ", ", end, ")");
  const int64_t length = p.table.length(b);
  TORCH_CHECK(length >= 0, "flashbpt: a request must have 0 keys or more, but request ", b, " has ",
              length);
  return {b, begin, end - begin, length};
}

// Slots of keys [first, request.length), int64.
at::Tensor slots_of(const PagedCall& call, const Request& request, int64_t first) {
  const PagedParams& p = call.params;
  const PageTableView& table = p.table;
  const int64_t size = table.page_size, slots = call.k_cache.size(0) * size;
  const int64_t per_entry = table.slots ? 1 : size;
  const int64_t entries = (request.length + per_entry - 1) / per_entry;
  int64_t there = table.indptr ? table.indptr[request.index + 1] - table.indptr[request.index]
                               : call.table.entries.size(1);
  TORCH_CHECK(entries <= there, "flashbpt: request ", request.index, " has ", request.length,
              " keys, which take ", entries, " entries of its page table, but the table has ",
              there);
  if (table.rows) {
    const int64_t row = table.rows[request.index];
    TORCH_CHECK(row >= 0 && row < call.table.entries.size(0), "flashbpt: req_pool_indices must be ",
                "rows of req_to_token, [0, ", call.table.entries.size(0), "), got ", row);
  }
  at::Tensor out = at::empty({request.length - first}, at::kLong);
  const int64_t begin = table.begin(request.index);
  int64_t* const to = out.data_ptr<int64_t>();
  for (int64_t k = first; k < request.length; ++k) {
    to[k - first] = table.slot(begin, k);
    TORCH_CHECK(to[k - first] >= 0 && to[k - first] < slots, "flashbpt: key ", k, " of request ",
                request.index, " lies in slot ", to[k - first], ", but the cache has ", slots,
                " slots");
  }
  return out;
}

// The first key that a row sees: the first row sees the earliest one.
int64_t first_key(const PagedParams& p, const Request& request) {
  return std::clamp<int64_t>(request.length - request.rows - p.band.left, 0, request.length);
}

// Which keys [first, length) the new rows see by the tree: all older ones, and of the newest
// `rows` those that their square says.
at::Tensor tree_of(const Request& request, const at::Tensor& square, int64_t first) {
  at::Tensor seen = at::ones({request.rows, request.length - first}, at::kBool);
  const int64_t own = std::min(request.rows, request.length - first);
  seen.narrow(1, request.length - first - own, own)
      .copy_(square.narrow(1, request.rows - own, own));
  return seen;
}

}  // namespace

void check_requests(const PagedCall& call) {
  for (int64_t b = 0; b < call.params.batch; ++b) {
    const Request request = checked_request(call, b);
    if (request.rows > 0) slots_of(call, request, first_key(call.params, request));
  }
}

void paged_attention(const PagedCall& call, const at::Tensor& out, const at::Tensor& lse) {
  const PagedParams& p = call.params;
  const bool exact = is_fp8(call.k_cache) || call.options.key_scale || call.options.value_scale;
  const at::ScalarType acc = accumulation_dtype(call.q.scalar_type());
  const at::ScalarType dtype = exact ? acc : call.q.scalar_type();
  int64_t tree_at = 0, last_row = 0;
  AttentionOptions options{};
  options.scale = p.scale;
  options.window_left = call.options.window_left;
  options.window_right = call.options.window_right;
  options.causal = call.options.causal && p.tree == nullptr;
  options.softcap = p.softcap;
  options.backend = call.options.backend;
  if (call.sinks.defined()) options.sinks = call.sinks;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Request request = checked_request(call, b);
    last_row = request.row_begin + request.rows;
    const int64_t squares = p.tree ? request.rows * request.rows : 0;
    TORCH_CHECK(!p.tree || tree_at + squares <= call.tree.numel(), "flashbpt: tree_mask must have ",
                "the squares of all requests' rows, but request ", b, " ends at ",
                tree_at + squares, " of ", call.tree.numel());
    if (request.rows > 0) {
      const int64_t diagonal = request.length - request.rows, first = first_key(p, request);
      const at::Tensor slots = slots_of(call, request, first);
      const auto keys = [&](const at::Tensor& cache, const std::optional<at::Tensor>& scale) {
        return scaled(gather(cache, slots).to(dtype), scale).transpose(0, 1).unsqueeze(0);
      };
      options.diagonal = diagonal;
      options.k_offset = first;
      if (call.slopes.defined())
        options.alibi_slopes = call.slopes.dim() == 2 ? call.slopes[b] : call.slopes;
      if (p.tree) {
        const at::Tensor square =
            call.tree.narrow(0, tree_at, squares).view({request.rows, request.rows});
        options.mask = tree_of(request, square, first).view({1, 1, request.rows, -1});
      }
      const at::Tensor q = call.q.narrow(0, request.row_begin, request.rows).to(dtype);
      const auto results = attention_forward(q.transpose(0, 1).unsqueeze(0),
                                             keys(call.k_cache, call.options.key_scale),
                                             keys(call.v_cache, call.options.value_scale), options);
      out.narrow(0, request.row_begin, request.rows)
          .copy_(std::get<0>(results).squeeze(0).transpose(0, 1));
      lse.narrow(0, request.row_begin, request.rows)
          .copy_(std::get<1>(results).squeeze(0).transpose(0, 1));
    }
    tree_at += squares;
  }
  // Rows of no request.
  out.narrow(0, last_row, p.tokens - last_row).zero_();
  lse.narrow(0, last_row, p.tokens - last_row).fill_(-INFINITY);
}

namespace {

// Keys, of the tokens `kept`, rotated by the angles of their positions, in the accumulation type;
// the first 2 * cos.size(1) columns, as pairs (i, i + half) or, interleaved, (2 i, 2 i + 1).
at::Tensor rotated(const at::Tensor& key, const at::Tensor& kept, const AppendOptions& options) {
  const at::Tensor x = key.to(accumulation_dtype(key.scalar_type()));
  if (!options.cos) return x;
  const auto rows = [&](const at::Tensor& table) {
    return table
        .index_select(
            0, options.positions ? options.positions->to(at::kLong).index_select(0, kept) : kept)
        .to(x.scalar_type())
        .unsqueeze(1);
  };
  const at::Tensor cos = rows(*options.cos), sin = rows(*options.sin);
  const int64_t half = cos.size(-1), width = x.size(-1);
  const at::Tensor turning = x.narrow(-1, 0, 2 * half);
  at::Tensor first, second, turned;
  if (options.interleaved) {
    const at::Tensor pairs = turning.unflatten(-1, {half, 2});
    first = pairs.select(-1, 0), second = pairs.select(-1, 1);
  } else {
    first = turning.narrow(-1, 0, half), second = turning.narrow(-1, half, half);
  }
  const at::Tensor a = first * cos - second * sin, b = second * cos + first * sin;
  turned = options.interleaved ? at::stack({a, b}, -1).flatten(-2) : at::cat({a, b}, -1);
  return at::cat({turned, x.narrow(-1, 2 * half, width - 2 * half)}, -1);
}

// As the cache stores them: over the scale, and at most its largest number in size.
at::Tensor stored(const at::Tensor& x, const at::Tensor& cache,
                  const std::optional<at::Tensor>& scale) {
  at::Tensor units = x;
  if (scale) {
    units = units.to(accumulation_dtype(x.scalar_type())) /
            (scale->numel() == 1 ? scale->reshape({1, 1, 1}) : scale->reshape({1, -1, 1}));
  }
  if (!is_fp8(cache)) return units.to(cache.scalar_type());
  const double largest = cache.scalar_type() == at::kFloat8_e4m3fn ? 448.0 : 57344.0;
  return units.to(at::kFloat).clamp(-largest, largest).to(cache.scalar_type());
}

void write_slots(const at::Tensor& cache, const at::Tensor& slots, const at::Tensor& rows) {
  const int64_t size = cache.size(1);
  const at::Tensor bytes = is_fp8(cache) ? cache.view(at::kByte) : cache;
  const at::Tensor values = is_fp8(cache) ? rows.contiguous().view(at::kByte) : rows;
  bytes.index_put_({slots.div(size, "floor"), slots.remainder(size)}, values);
}

}  // namespace

void append_paged_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache,
                     const at::Tensor& v_cache, const at::Tensor& slot_mapping,
                     const AppendOptions& options) {
  check_slot_mapping(slot_mapping, k_cache.size(0) * k_cache.size(1));
  const at::Tensor wanted = slot_mapping.to(at::kLong);
  const at::Tensor kept = (wanted >= 0).nonzero().squeeze(1);
  const at::Tensor to = wanted.index_select(0, kept);
  if (to.numel() == 0) return;
  write_slots(
      k_cache, to,
      stored(rotated(key.index_select(0, kept), kept, options), k_cache, options.key_scale));
  write_slots(v_cache, to, stored(value.index_select(0, kept), v_cache, options.value_scale));
}

}  // namespace flashbpt::cpu
