// Attention backward on the CPU: recompute P from LSE, tile by tile.
//
//   P = exp(S - LSE)      delta = rowsum(dO * O) - dLSE      dP = dO V^T
//   dS = P * (dP - delta)      dV += P^T dO      dK += scale * dS^T Q      dQ += scale * dS K
//   dsink -= exp(sink - LSE) * delta      dslope -= dS * |q + shift - k|      dmask += dS
//
// With dropout P and dP carry keep / (1 - p), dS the undropped P; with softcap dS is multiplied by
// 1 - tanh^2 on its way to dQ and dK. One task owns a run of kv heads of one sequence and every
// `partials`-th query tile, so no accumulator is shared and the sums have one order: the result is
// deterministic. The mask's gradient is summed over whatever the mask is broadcast over, so it has
// a pass of its own in which a task owns a piece of the mask.
#include <cmath>
#include <limits>

#include "attention.h"
#include "row_math.h"
#include "score_tile.h"

namespace flashbpt::cpu {
namespace {

// LSE of a row without keys.
template <typename T>
constexpr T kNoKeys = -std::numeric_limits<T>::infinity();

template <typename T>
struct BackwardScratch {
  Scratch<T> q, k, v, out, grad_out, s, dp, tanh, dq, delta;
  Scratch<uint8_t> keep;
};

// What the tiles of one query tile share.
template <typename T>
struct QueryInputs {
  at::Tensor q;         // [kv_heads, group_rows, dim]
  at::Tensor grad_out;  // [kv_heads, group_rows, dim_v]
  const T* delta;       // [flat_rows]
};

// A row without keys: its gradients are 0, whatever arrives for its output and LSE.
template <typename T>
bool is_dead(const AttentionParams& p, const QueryTile& q, int64_t head, int64_t row) {
  return value_at<T>(p.lse, q.seq->batch, head, q.seq->q_begin + row) == kNoKeys<T>;
}

template <typename T>
T lse_lo_value(const AttentionParams& p, const Sequence& seq, int64_t head, int64_t row) {
  return p.lse_lo ? value_at<T>(p.lse_lo, seq.batch, head, seq.q_begin + row) : T(0);
}

// Flat row i of [kv_heads, group_rows, dim] with unit stride in the last dimension.
template <typename T>
const T* row_of(const at::Tensor& t, int64_t i) {
  const int64_t rows = t.size(1);
  return static_cast<const T*>(t.data_ptr()) + i / rows * t.stride(0) + i % rows * t.stride(1);
}

template <typename T>
QueryInputs<T> load_query_inputs(const AttentionBackwardParams& p, const QueryTile& q,
                                 BackwardScratch<T>& w) {
  T* delta = w.delta.get(q.flat_rows());
  bool dead = false;
  for_each_row(q, [&](int64_t, int64_t head, int64_t row) { dead |= is_dead<T>(p, q, head, row); });
  const at::Tensor out = load_queries(p.out, q, p.dim_v, w.out);
  QueryInputs<T> in{load_queries(p.q, q, p.dim, w.q),
                    load_queries(p.grad_out, q, p.dim_v, w.grad_out, /*copy=*/dead), delta};
  for_each_row(q, [&](int64_t i, int64_t head, int64_t row) {
    if (is_dead<T>(p, q, head, row)) {
      delta[i] = T(0);
      T* grad = const_cast<T*>(row_of<T>(in.grad_out, i));  // the copy's
      std::fill(grad, grad + p.dim_v, T(0));
      return;
    }
    delta[i] = dot_row(row_of<T>(out, i), row_of<T>(in.grad_out, i), p.dim_v);
    if (p.grad_lse) {
      delta[i] -= value_at<T>(p.grad_lse, q.seq->batch, head, q.seq->q_begin + row);
    }
  });
  return in;
}

// s [flat_rows, cols] = P, undropped; tanh as in score_tile.
template <typename T>
void probability_tile(const AttentionBackwardParams& p, const QueryTile& q, KeyTile k,
                      const QueryInputs<T>& in, const at::Tensor& key, T* s, T* tanh) {
  score_tile(p, q, k, in.q, key, s, tanh);
  for_each_row(q, [&](int64_t i, int64_t head, int64_t row) {
    const Columns c = visible_columns(p, *q.seq, k, row);
    T* x = s + i * k.cols;
    clear_hidden(x, c, k.cols);
    const T lse = value_at<T>(p.lse, q.seq->batch, head, q.seq->q_begin + row);
    if (lse == kNoKeys<T>) {
      std::fill(x + c.begin, x + c.end, T(0));
    } else {
      exp_row(x + c.begin, c.size(), lse, lse_lo_value<T>(p, *q.seq, head, row));
    }
  });
}

// dp [flat_rows, cols] = dS = P * (dP - delta), before the derivative of the softcap.
template <typename T>
void score_grad_tile(const AttentionBackwardParams& p, const QueryTile& q, KeyTile k,
                     const QueryInputs<T>& in, const at::Tensor& value, const T* s,
                     const uint8_t* keep, T* dp) {
  at::Tensor grad = wrap_contiguous(dp, q.kv_heads, q.group_rows(), k.cols);
  // dP = dO V^T
  gemm(grad, in.grad_out, transposed(value), 0.0, 1.0);
  if (keep) drop_row(dp, keep, q.flat_rows() * k.cols, static_cast<T>(p.dropout_scale));
  for_each_row(q, [&](int64_t i, int64_t head, int64_t row) {
    const Columns c = visible_columns(p, *q.seq, k, row);
    T* x = dp + i * k.cols;
    clear_hidden(x, c, k.cols);
    if (is_dead<T>(p, q, head, row)) {
      std::fill(x + c.begin, x + c.end, T(0));  // whatever V holds
    } else {
      softmax_grad_row(x + c.begin, s + i * k.cols + c.begin, c.size(), in.delta[i]);
    }
  });
}

template <typename T>
const uint8_t* keep_or_null(const AttentionParams& p, const QueryTile& q, KeyTile k,
                            BackwardScratch<T>& w) {
  if (p.dropout_threshold == 0) return nullptr;
  uint8_t* keep = w.keep.get(q.flat_rows() * k.cols);
  keep_tile(p, q, k, keep);
  return keep;
}

// The rows of an accumulator [partials, batch, kv_heads, len_k, dim] that a key tile adds into.
inline at::Tensor accumulator(const TensorView& v, int64_t partial_offset, const QueryTile& q,
                              KeyTile k, int64_t dim) {
  TensorView copy = v;
  copy.data = static_cast<char*>(v.data) +
              partial_offset * static_cast<int64_t>(c10::elementSize(scalar_type(v.dtype)));
  return view_tile(copy, q.seq->batch, q.kv_head, q.kv_heads, q.seq->k_begin + k.begin, k.cols,
                   dim);
}

template <typename T>
void backward_key_tile(const AttentionBackwardParams& p, const QueryTile& q, KeyTile k,
                       int64_t partial, const QueryInputs<T>& in, T* dq, BackwardScratch<T>& w) {
  const int64_t scores = q.flat_rows() * k.cols;
  T* s = w.s.get(scores);
  T* dp = w.dp.get(scores);
  T* tanh = p.softcap > 0 ? w.tanh.get(scores) : nullptr;
  const at::Tensor key = load_keys(p.k, q, k, p.dim, w.k);
  const auto tile = [&](T* data) {
    return wrap_contiguous(data, q.kv_heads, q.group_rows(), k.cols);
  };
  probability_tile(p, q, k, in, key, s, tanh);
  const uint8_t* keep = keep_or_null(p, q, k, w);
  if (p.dv) {
    T* dropped = s;
    if (keep) {
      dropped = dp;
      std::copy(s, s + scores, dropped);
      drop_row(dropped, keep, scores, static_cast<T>(p.dropout_scale));
    }
    // dV += P^T dO
    at::Tensor dv = accumulator(p.dv, partial * p.dv_partial_stride, q, k, p.dim_v);
    gemm(dv, transposed(tile(dropped)), in.grad_out, 1.0, 1.0);
  }
  if (!p.dq && !p.dk && !p.dalibi) return;
  score_grad_tile(p, q, k, in, load_keys(p.v, q, k, p.dim_v, w.v), s, keep, dp);
  if (p.dalibi) {
    for_each_row(q, [&](int64_t i, int64_t head, int64_t row) {
      const int64_t distance = row + q.seq->shift - k.begin;
      value_at<T>(p.dalibi, q.seq->batch, head, partial) -=
          dot_alibi_row(dp + i * k.cols, k.cols, distance);
    });
  }
  if (tanh) tanh_grad_row(dp, tanh, scores);
  if (p.dk) {
    // dK += scale * dS^T Q
    at::Tensor dk = accumulator(p.dk, partial * p.dk_partial_stride, q, k, p.dim);
    gemm(dk, transposed(tile(dp)), in.q, 1.0, p.scale);
  }
  if (p.dq) {
    // dQ += scale * dS K
    at::Tensor grad = wrap_contiguous(dq, q.kv_heads, q.group_rows(), p.dim);
    gemm(grad, tile(dp), key, 1.0, p.scale);
  }
}

template <typename T>
void add_sink_grads(const AttentionBackwardParams& p, const QueryTile& q, int64_t partial,
                    const T* delta) {
  for_each_row(q, [&](int64_t i, int64_t head, int64_t row) {
    const T sink = value_at<T>(p.sinks, 0, head, 0);
    const T lse = value_at<T>(p.lse, q.seq->batch, head, q.seq->q_begin + row);
    if (lse == kNoKeys<T>) return;
    const T weight = std::exp((sink - lse) - lse_lo_value<T>(p, *q.seq, head, row));
    value_at<T>(p.dsinks, q.seq->batch, head, partial) -= weight * delta[i];
  });
}

template <typename T>
void backward_query_tile(const AttentionBackwardParams& p, const QueryTile& q, int64_t partial,
                         BackwardScratch<T>& w) {
  const QueryInputs<T> in = load_query_inputs(p, q, w);
  T* dq = w.dq.get(q.flat_rows() * p.dim);
  if (p.dq) std::fill_n(dq, q.flat_rows() * p.dim, T(0));
  if (p.dsinks) add_sink_grads(p, q, partial, in.delta);
  const KeyRange keys = visible_keys(p, q);
  for (int64_t begin = keys.begin; begin < keys.end; begin += kBlockK) {
    const KeyTile k{begin, std::min(kBlockK, keys.end - begin)};
    if (mask_allows_any(p, q, k)) backward_key_tile(p, q, k, partial, in, dq, w);
  }
  if (p.dq) {
    view_tile(p.dq, q.seq->batch, q.head, q.heads, q.seq->q_begin + q.row, q.rows, p.dim)
        .copy_(wrap_contiguous(dq, q.heads, q.rows, p.dim));
  }
}

// Heads of a group and query rows that share a tile; several whole groups where rows are few.
struct BackwardTiling {
  int64_t rows, heads, kv_heads;
};

BackwardTiling backward_tiling(const AttentionParams& p, const Sequence& seq, int64_t tasks) {
  BackwardTiling t{std::min(std::max<int64_t>(seq.len_q, 1), kBlockQ), 1, 1};
  t.heads = std::min(p.group(), std::max<int64_t>(1, kBlockQ / t.rows));
  if (t.heads == p.group() && t.rows == seq.len_q) {
    const int64_t scores = t.heads * t.rows * std::min(seq.len_k, kBlockK);
    t.kv_heads = std::clamp<int64_t>(kTileScores / std::max<int64_t>(scores, 1), 1, p.heads_kv);
    while (t.kv_heads > 1 && p.batch * at::divup(p.heads_kv, t.kv_heads) < tasks) {
      t.kv_heads = at::divup(t.kv_heads, 2);
    }
  }
  return t;
}

struct BackwardTask {
  const Sequence* seq;
  BackwardTiling tiling;
  int64_t kv_head, kv_heads, partial;
};

template <typename T>
void backward_task(const AttentionBackwardParams& p, const BackwardTask& t, BackwardScratch<T>& w) {
  const int64_t group = p.group(), rows = t.tiling.rows;
  const int64_t step = t.kv_heads > 1 ? group : t.tiling.heads;
  // Causal sequences end with their heaviest tiles, so the copies take turns.
  for (int64_t n = t.partial; n * rows < t.seq->len_q; n += p.partials) {
    const int64_t row = n * rows;
    for (int64_t g = 0; g < group; g += step) {
      const int64_t heads = t.kv_heads > 1 ? t.kv_heads * group : std::min(step, group - g);
      const QueryTile q{t.seq,
                        t.kv_head,
                        t.kv_heads,
                        t.kv_head * group + g,
                        heads,
                        row,
                        std::min(rows, t.seq->len_q - row)};
      backward_query_tile(p, q, t.partial, w);
    }
  }
}

// The part of dmask that one task owns: one (batch, head) of the mask and, where the mask has rows,
// one block of them. Everything the mask is broadcast over is summed here, in one order.
template <typename T>
void mask_task(const AttentionBackwardParams& p, const Sequence& seq, int64_t mask_head,
               int64_t row, int64_t rows, BackwardScratch<T>& w) {
  const int64_t head_begin = p.dmask.head ? mask_head : 0;
  const int64_t head_end = p.dmask.head ? mask_head + 1 : p.heads_q;
  for (int64_t head = head_begin; head < head_end; ++head) {
    const QueryTile q{&seq, head / p.group(), 1, head, 1, row, rows};
    const QueryInputs<T> in = load_query_inputs(p, q, w);
    const KeyRange keys = visible_keys(p, q);
    for (int64_t begin = keys.begin; begin < keys.end; begin += kBlockK) {
      const KeyTile k{begin, std::min(kBlockK, keys.end - begin)};
      T* s = w.s.get(q.flat_rows() * k.cols);
      T* ds = w.dp.get(q.flat_rows() * k.cols);
      probability_tile<T>(p, q, k, in, load_keys(p.k, q, k, p.dim, w.k), s, nullptr);
      score_grad_tile(p, q, k, in, load_keys(p.v, q, k, p.dim_v, w.v), s, keep_or_null(p, q, k, w),
                      ds);
      for_each_row(q, [&](int64_t i, int64_t, int64_t row) {
        T* out = &value_at<T>(p.dmask, seq.batch, head, row);
        const T* from = ds + i * k.cols;
        if (p.dmask.col) {
          add_row(out + k.begin, from, k.cols);
        } else {
          for (int64_t j = 0; j < k.cols; ++j) *out += from[j];
        }
      });
    }
  }
}

template <typename T>
void mask_backward(const AttentionBackwardParams& p, const std::vector<Sequence>& seqs,
                   int64_t threads, std::vector<BackwardScratch<T>>& scratch) {
  const int64_t batches = p.dmask.batch ? p.batch : 1;
  const int64_t heads = p.dmask.head ? p.heads_q : 1;
  const int64_t blocks = at::divup(p.len_q, kBlockQ);
  const int64_t row_tasks = p.dmask.row ? blocks : 1;
  for_each_task(threads, batches * heads * row_tasks, [&](int64_t i) {
    BackwardScratch<T>& w = scratch[threads > 1 ? at::get_thread_num() : 0];
    const int64_t block = i % row_tasks, head = i / row_tasks % heads;
    const int64_t batch = i / row_tasks / heads;
    for (int64_t b = batch; b < (p.dmask.batch ? batch + 1 : p.batch); ++b) {
      for (int64_t n = block; n < (p.dmask.row ? block + 1 : blocks); ++n) {
        const int64_t row = n * kBlockQ;
        mask_task(p, seqs[b], head, row, std::min(kBlockQ, p.len_q - row), w);
      }
    }
  });
}

template <typename T>
void backward(const AttentionBackwardParams& p) {
  if (p.heads_q == 0) return;
  const std::vector<Sequence> seqs = sequences_of(p);
  const int64_t threads = threads_for(p, seqs);
  std::vector<BackwardScratch<T>> scratch(std::max<int64_t>(threads, 1));
  std::vector<BackwardTask> tasks;
  for (const Sequence& seq : seqs) {
    const BackwardTiling t = backward_tiling(p, seq, threads);
    for (int64_t kv = 0; kv < p.heads_kv; kv += t.kv_heads) {
      for (int64_t n = 0; n < p.partials; ++n) {
        tasks.push_back({&seq, t, kv, std::min(t.kv_heads, p.heads_kv - kv), n});
      }
    }
  }
  if (p.dq || p.dk || p.dv || p.dsinks || p.dalibi) {
    for_each_task(threads, tasks.size(), [&](int64_t i) {
      backward_task(p, tasks[i], scratch[threads > 1 ? at::get_thread_num() : 0]);
    });
  }
  if (p.dmask) mask_backward(p, seqs, threads, scratch);
}

}  // namespace

int64_t backward_partials(const AttentionParams& p) {
  // Each copy costs memory as large as dk and dv in fp32.
  constexpr int64_t kMostPartials = 16;
  const std::vector<Sequence> seqs = sequences_of(p);
  double total = 0, largest = 0;
  int64_t rows = 1;
  for (const Sequence& seq : seqs) {
    const double work = static_cast<double>(seq.len_q) * seq.len_k;
    total += work * std::max<int64_t>(p.heads_kv, 1);
    largest = std::max(largest, work);
    rows = std::max(rows, seq.len_q);
  }
  if (total == 0) return 1;
  // The heaviest owner in as many parts as it holds shares of a thread.
  const double shares = std::ceil(static_cast<double>(threads_for(p, seqs)) * largest / total);
  const int64_t most = std::min(kMostPartials, at::divup(rows, kBlockQ));
  return std::clamp<int64_t>(static_cast<int64_t>(shares), 1, most);
}

void attention_backward(const AttentionBackwardParams& p) {
  if (p.q.dtype == DataType::kFloat64) return backward<double>(p);
  backward<float>(p);
}

}  // namespace flashbpt::cpu
