// How the CPU cuts attention into tiles and hands them to ATen's matmul.
//
// A query tile is a run of `heads` consecutive query heads times `rows` query rows of one sequence,
// seen as [kv_heads, heads / kv_heads * rows, dim], so that the heads of a group meet their keys in
// one matrix product. Its flat rows run over the rows of one head after the other.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "sequences.h"

namespace flashbpt::cpu {

constexpr int64_t kBlockQ = 256;                    // query rows of a tile, all heads together
constexpr int64_t kBlockK = 512;                    // keys of a tile
constexpr int64_t kTileScores = kBlockQ * kBlockK;  // scores of a tile: 512 KB in fp32
// Below this many multiplications a call stays on one thread: starting the others costs more.
constexpr double kSerialWork = 1 << 17;

struct QueryTile {
  const Sequence* seq;
  int64_t kv_head, kv_heads;
  int64_t head, heads;
  int64_t row, rows;

  int64_t flat_rows() const { return heads * rows; }
  int64_t group_rows() const { return heads / kv_heads * rows; }  // rows that share a kv head
};

// f(flat row, head, row) for every row of a tile.
template <typename F>
void for_each_row(const QueryTile& q, const F& f) {
  int64_t i = 0;
  for (int64_t head = q.head; head < q.head + q.heads; ++head) {
    for (int64_t row = q.row; row < q.row + q.rows; ++row) f(i++, head, row);
  }
}

struct KeyTile {
  int64_t begin, cols;
};

// How many threads a call is worth, by its multiplications; masks not discounted.
inline int64_t threads_for(const AttentionParams& p, const std::vector<Sequence>& seqs) {
  if (at::in_parallel_region()) return 1;
  double scores = 0;
  for (const Sequence& seq : seqs) scores += static_cast<double>(seq.len_q) * seq.len_k;
  const double work = scores * p.heads_q * std::max<int64_t>(p.dim + p.dim_v, 1);
  return work <= kSerialWork ? 1 : at::get_num_threads();
}

// Runs f(i) for i in [0, n), each once; whoever is free takes the next one.
template <typename F>
void for_each_task(int64_t threads, int64_t n, const F& f) {
  threads = std::min(threads, n);
  if (threads <= 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // other threads do not inherit it
    for (int64_t i = next++; i < n; i = next++) f(i);
  });
}

// Memory of one thread, reused from tile to tile.
template <typename T>
class Scratch {
 public:
  T* get(int64_t n) {
    if (n > size_) {
      data_.reset(new T[n]);
      size_ = n;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
};

inline at::ScalarType scalar_type(DataType t) {
  switch (t) {
    case DataType::kFloat64:
      return at::kDouble;
    case DataType::kFloat32:
      return at::kFloat;
    case DataType::kBFloat16:
      return at::kBFloat16;
    case DataType::kFloat16:
      return at::kHalf;
    case DataType::kBool:
      return at::kBool;
  }
  return at::kFloat;
}

inline at::Tensor wrap(void* data, at::IntArrayRef sizes, at::IntArrayRef strides,
                       at::ScalarType dtype) {
  return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype));
}

template <typename T>
at::Tensor wrap_contiguous(T* data, int64_t n, int64_t rows, int64_t cols) {
  return wrap(data, {n, rows, cols}, {rows * cols, cols, 1}, c10::CppTypeToScalarType<T>::value);
}

inline char* element(const TensorView& v, int64_t batch, int64_t head, int64_t row) {
  const int64_t offset = batch * v.batch + head * v.head + row * v.row;
  return static_cast<char*>(v.data) + offset * c10::elementSize(scalar_type(v.dtype));
}

// [heads, rows, cols] of a view, as it lies in memory.
inline at::Tensor view_tile(const TensorView& v, int64_t batch, int64_t head, int64_t heads,
                            int64_t row, int64_t rows, int64_t cols) {
  return wrap(element(v, batch, head, row), {heads, rows, cols}, {v.head, v.row, v.col},
              scalar_type(v.dtype));
}

// The last two dimensions swapped. (Tensor::transpose goes through the dispatcher.)
inline at::Tensor transposed(const at::Tensor& t) {
  return wrap(t.data_ptr(), {t.size(0), t.size(2), t.size(1)},
              {t.stride(0), t.stride(2), t.stride(1)}, t.scalar_type());
}

// K or V of a tile [kv_heads, cols, dim] in the accumulation type; in place where it has that type.
template <typename T>
at::Tensor load_keys(const TensorView& v, const QueryTile& q, KeyTile k, int64_t dim,
                     Scratch<T>& scratch) {
  at::Tensor tile =
      view_tile(v, q.seq->batch, q.kv_head, q.kv_heads, q.seq->k_begin + k.begin, k.cols, dim);
  if (scalar_type(v.dtype) == c10::CppTypeToScalarType<T>::value) return tile;
  at::Tensor copy =
      wrap_contiguous(scratch.get(q.kv_heads * k.cols * dim), q.kv_heads, k.cols, dim);
  return copy.copy_(tile);
}

// q, out or grad_out of a tile as [kv_heads, group_rows, dim] in the accumulation type; in place
// where it has that type, a head is alone in its group and rows have unit stride; always a copy
// with `copy`.
template <typename T>
at::Tensor load_queries(const TensorView& v, const QueryTile& q, int64_t dim, Scratch<T>& scratch,
                        bool copy = false) {
  at::Tensor tile =
      view_tile(v, q.seq->batch, q.head, q.heads, q.seq->q_begin + q.row, q.rows, dim);
  if (scalar_type(v.dtype) == c10::CppTypeToScalarType<T>::value && q.heads == q.kv_heads &&
      v.col == 1 && !copy) {
    return tile;
  }
  T* data = scratch.get(q.flat_rows() * dim);
  wrap_contiguous(data, q.heads, q.rows, dim).copy_(tile);
  return wrap_contiguous(data, q.kv_heads, q.group_rows(), dim);
}

// c = beta * c + alpha * a b, batched over the kv heads of a tile.
inline void gemm(at::Tensor& c, const at::Tensor& a, const at::Tensor& b, double beta,
                 double alpha) {
  at::cpu::baddbmm_out(c, c, a, b, beta, alpha);
}

// A value a row or a head, in the accumulation type: lse, sinks, slopes and their gradients.
template <typename T>
T& value_at(const TensorView& v, int64_t batch, int64_t head, int64_t row) {
  return static_cast<T*>(v.data)[batch * v.batch + head * v.head + row * v.row];
}

}  // namespace flashbpt::cpu
