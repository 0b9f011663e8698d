// Attention forward on the CPU: online softmax over tiles.
//
//   S = scale * Q K^T (+ terms)      P = exp(S - m)      l = sum P      O = P V / l
//   LSE = m + log l
//
// One task is one query tile (tiles.h); it walks over its keys in tiles of kBlockK and holds the
// running maximum m, the sum l and O in the accumulation type. Nobody shares a row, so the result
// does not depend on the number of threads. Memory: one tile of scores and one of O a thread.
// Equations and numbers: docs/attention_cpu.md
#include <cmath>
#include <limits>

#include "attention.h"
#include "row_math.h"
#include "score_tile.h"

namespace flashbpt::cpu {
namespace {

template <typename T>
constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

template <typename T>
struct ForwardScratch {
  Scratch<T> q, k, v, s, o, m, l;
  Scratch<uint8_t> keep;
};

// Query tiles of one sequence, all alike but for the last rows.
struct Tiling {
  int64_t rows;      // query rows
  int64_t heads;     // query heads of one group that share a tile
  int64_t kv_heads;  // kv heads, only when a tile holds whole groups
};

Tiling choose_tiling(const AttentionParams& p, int64_t len_q, int64_t len_k, int64_t threads) {
  Tiling t{std::min(len_q, kBlockQ), 1, 1};
  t.heads = std::min(p.group(), std::max<int64_t>(1, kBlockQ / t.rows));
  if (t.heads == p.group()) {
    const int64_t scores = t.heads * t.rows * std::min(len_k, kBlockK);
    t.kv_heads = std::clamp<int64_t>(kTileScores / std::max<int64_t>(scores, 1), 1, p.heads_kv);
  }
  const auto tasks = [&] {
    const int64_t heads = t.kv_heads * t.heads;
    return p.batch * at::divup(p.heads_q, heads) * at::divup(len_q, t.rows);
  };
  // Smaller tiles until every thread has one: first fewer heads, then fewer rows.
  while (tasks() < threads && t.kv_heads > 1) t.kv_heads = at::divup(t.kv_heads, 2);
  while (tasks() < threads && t.heads > 1) t.heads = at::divup(t.heads, 2);
  while (tasks() < threads && t.rows > 32) t.rows = at::divup(t.rows, 2);
  return t;
}

std::vector<QueryTile> query_tiles(const AttentionParams& p, const std::vector<Sequence>& seqs,
                                   int64_t threads) {
  std::vector<QueryTile> tiles;
  if (p.heads_q == 0) return tiles;
  const int64_t group = p.group();
  for (const Sequence& seq : seqs) {
    if (seq.len_q == 0) continue;
    const Tiling t = choose_tiling(p, seq.len_q, seq.len_k, threads);
    for (int64_t kv = 0; kv < p.heads_kv; kv += t.kv_heads) {
      const int64_t kv_heads = std::min(t.kv_heads, p.heads_kv - kv);
      const int64_t step = kv_heads > 1 ? group : t.heads;
      for (int64_t g = 0; g < group; g += step) {
        const int64_t heads = kv_heads > 1 ? kv_heads * group : std::min(step, group - g);
        // The last rows of a causal sequence see the most keys: they go first.
        for (int64_t end = seq.len_q; end > 0; end -= t.rows) {
          const int64_t row = std::max<int64_t>(0, end - t.rows);
          tiles.push_back({&seq, kv, kv_heads, kv * group + g, heads, row, end - row});
        }
      }
    }
  }
  return tiles;
}

// One tile of scores becomes P, and m, l and O follow the new maximum. `first`: O is not there yet.
template <typename T>
void softmax_tile(const AttentionParams& p, const QueryTile& q, KeyTile k, bool first,
                  ForwardScratch<T>& w) {
  T* o = w.o.get(q.flat_rows() * p.dim_v);
  T* m = w.m.get(q.flat_rows());
  T* l = w.l.get(q.flat_rows());
  T* s = w.s.get(q.flat_rows() * k.cols);
  for_each_row(q, [&](int64_t i, int64_t, int64_t row) {
    const Columns c = visible_columns(p, *q.seq, k, row);
    T* x = s + i * k.cols;
    clear_hidden(x, c, k.cols);
    const T top = std::max(m[i], row_max(x + c.begin, c.size()));
    // A row without keys so far keeps -inf; then exp(-inf - 0) = 0 is what its keys weigh.
    const T reference = top == kMinusInfinity<T> ? T(0) : top;
    const T sum = exp_row(x + c.begin, c.size(), reference, T(0));
    const T fade = std::exp(m[i] - reference);
    if (!first && fade != T(1)) scale_row(o + i * p.dim_v, p.dim_v, fade);
    l[i] = l[i] * fade + sum;
    m[i] = top;
  });
  if (p.dropout_threshold == 0) return;
  uint8_t* keep = w.keep.get(q.flat_rows() * k.cols);
  keep_tile(p, q, k, keep);
  drop_row(s, keep, q.flat_rows() * k.cols, static_cast<T>(p.dropout_scale));
}

// O / l, the sink, LSE. A row without keys is 0 whatever V holds.
template <typename T>
void finish_tile(const AttentionParams& p, const QueryTile& q, bool empty, ForwardScratch<T>& w) {
  T* o = w.o.get(q.flat_rows() * p.dim_v);
  const T* m = w.m.get(q.flat_rows());
  const T* l = w.l.get(q.flat_rows());
  for_each_row(q, [&](int64_t i, int64_t head, int64_t row) {
    T top = m[i], sum = l[i], factor = T(1);
    if (p.sinks) {
      const T sink = value_at<T>(p.sinks, 0, head, 0);
      top = std::max(m[i], sink);
      if (top != kMinusInfinity<T>) {
        factor = std::exp(m[i] - top);
        sum = l[i] * factor + std::exp(sink - top);
      }
    }
    T* x = o + i * p.dim_v;
    if (p.drops_all()) {
      std::fill(x, x + p.dim_v, T(0));
    } else if (empty || m[i] == kMinusInfinity<T>) {
      // NaN scores leave m at -inf, but l shows them.
      std::fill(x, x + p.dim_v, std::isnan(sum) ? sum : T(0));
    } else {
      scale_row(x, p.dim_v, factor / sum);
    }
    const double log_sum = std::log(static_cast<double>(sum));
    const T lse = static_cast<T>(top + log_sum);  // -inf + -inf for a row without keys
    const int64_t token = q.seq->q_begin + row;
    value_at<T>(p.lse, q.seq->batch, head, token) = lse;
    if (p.lse_lo) {
      const double lost = (static_cast<double>(top) - lse) + log_sum;
      value_at<T>(p.lse_lo, q.seq->batch, head, token) = std::isfinite(lse) ? lost : T(0);
    }
  });
  view_tile(p.out, q.seq->batch, q.head, q.heads, q.seq->q_begin + q.row, q.rows, p.dim_v)
      .copy_(wrap_contiguous(o, q.heads, q.rows, p.dim_v));
}

template <typename T>
void forward_tile(const AttentionParams& p, const QueryTile& q, ForwardScratch<T>& w) {
  const at::Tensor query = load_queries(p.q, q, p.dim, w.q);
  T* o_data = w.o.get(q.flat_rows() * p.dim_v);
  at::Tensor o = wrap_contiguous(o_data, q.kv_heads, q.group_rows(), p.dim_v);
  std::fill_n(w.m.get(q.flat_rows()), q.flat_rows(), kMinusInfinity<T>);
  std::fill_n(w.l.get(q.flat_rows()), q.flat_rows(), T(0));
  bool first = true;
  const KeyRange keys = visible_keys(p, q);
  for (int64_t begin = keys.begin; begin < keys.end; begin += kBlockK) {
    const KeyTile k{begin, std::min(kBlockK, keys.end - begin)};
    if (!mask_allows_any(p, q, k)) continue;
    T* s = w.s.get(q.flat_rows() * k.cols);
    score_tile<T>(p, q, k, query, load_keys(p.k, q, k, p.dim, w.k), s, nullptr);
    softmax_tile(p, q, k, first, w);
    // O += P V
    gemm(o, wrap_contiguous(s, q.kv_heads, q.group_rows(), k.cols),
         load_keys(p.v, q, k, p.dim_v, w.v), first ? 0.0 : 1.0, 1.0);
    first = false;
  }
  finish_tile(p, q, first, w);
}

template <typename T>
void forward(const AttentionParams& p) {
  const std::vector<Sequence> seqs = sequences_of(p);
  const int64_t threads = threads_for(p, seqs);
  const std::vector<QueryTile> tiles = query_tiles(p, seqs, threads);
  std::vector<ForwardScratch<T>> scratch(std::max<int64_t>(threads, 1));
  for_each_task(threads, tiles.size(), [&](int64_t i) {
    forward_tile(p, tiles[i], scratch[threads > 1 ? at::get_thread_num() : 0]);
  });
}

}  // namespace

void attention_forward(const AttentionParams& p) {
  if (p.q.dtype == DataType::kFloat64) return forward<double>(p);
  forward<float>(p);
}

}  // namespace flashbpt::cpu
