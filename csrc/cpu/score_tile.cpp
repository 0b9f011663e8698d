#include "score_tile.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>
#include <limits>

#include "../attention/philox.h"
#include "row_math.h"

namespace flashbpt::cpu {
namespace {

// Element (row, first column of the tile) of the mask.
const char* mask_row(const AttentionParams& p, const QueryTile& q, KeyTile k, int64_t head,
                     int64_t row) {
  const TensorView& m = p.mask;
  return element(m, q.seq->batch, head, row) +
         k.begin * m.col * static_cast<int64_t>(c10::elementSize(scalar_type(m.dtype)));
}

template <typename T, typename M>
void add_mask_row(T* s, const char* mask, int64_t stride, Columns c) {
  const M* m = reinterpret_cast<const M*>(mask);
  if constexpr (std::is_same_v<T, M>) {
    if (stride == 1) return add_row(s + c.begin, m + c.begin, c.size());
  }
  for (int64_t j = c.begin; j < c.end; ++j) s[j] += static_cast<T>(m[j * stride]);
}

template <typename T>
void mask_scores(const AttentionParams& p, const char* mask, Columns c, T* s) {
  const int64_t stride = p.mask.col;
  switch (p.mask.dtype) {
    case DataType::kBool: {
      const bool* m = reinterpret_cast<const bool*>(mask);
      for (int64_t j = c.begin; j < c.end; ++j) {
        s[j] = m[j * stride] ? s[j] : -std::numeric_limits<T>::infinity();
      }
      return;
    }
    case DataType::kFloat64:
      return add_mask_row<T, double>(s, mask, stride, c);
    case DataType::kFloat32:
      return add_mask_row<T, float>(s, mask, stride, c);
    case DataType::kBFloat16:
      return add_mask_row<T, c10::BFloat16>(s, mask, stride, c);
    case DataType::kFloat16:
      return add_mask_row<T, c10::Half>(s, mask, stride, c);
  }
}

}  // namespace

KeyRange visible_keys(const AttentionParams& p, const QueryTile& q) {
  return p.band.of_rows(q.row, q.row + q.rows, q.seq->shift, q.seq->len_k);
}

bool mask_allows_any(const AttentionParams& p, const QueryTile& q, KeyTile k) {
  if (!p.boolean_mask()) return true;
  // Rows and heads over which the mask is broadcast repeat one row of memory.
  const int64_t heads = p.mask.head ? q.heads : 1, rows = p.mask.row ? q.rows : 1;
  const int64_t cols = p.mask.col ? k.cols : 1;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t r = 0; r < rows; ++r) {
      const bool* m = reinterpret_cast<const bool*>(mask_row(p, q, k, q.head + h, q.row + r));
      if (p.mask.col == 1) {
        if (std::memchr(m, 1, cols)) return true;
      } else {
        for (int64_t j = 0; j < cols; ++j) {
          if (m[j * p.mask.col]) return true;
        }
      }
    }
  }
  return false;
}

template <typename T>
void score_tile(const AttentionParams& p, const QueryTile& q, KeyTile k, const at::Tensor& query,
                const at::Tensor& key, T* s, T* tanh) {
  at::Tensor scores = wrap_contiguous(s, q.kv_heads, q.group_rows(), k.cols);
  // S = scale * Q K^T
  gemm(scores, query, transposed(key), 0.0, p.scale);
  if (p.softcap > 0) {
    scores.mul_(1.0 / p.softcap).tanh_();
    if (tanh) wrap_contiguous(tanh, q.kv_heads, q.group_rows(), k.cols).copy_(scores);
    scores.mul_(p.softcap);
  }
  if (!p.alibi && !p.mask) return;
  for_each_row(q, [&](int64_t i, int64_t head, int64_t row) {
    const Columns c = visible_columns(p, *q.seq, k, row);
    T* out = s + i * k.cols;
    if (p.alibi) {
      const T slope = value_at<T>(p.alibi, q.seq->batch, head, 0);
      const int64_t distance = row + q.seq->shift - k.begin - c.begin;
      add_alibi_row(out + c.begin, c.size(), slope, distance);
    }
    if (p.mask) mask_scores(p, mask_row(p, q, k, head, row), c, out);
  });
}

void keep_tile(const AttentionParams& p, const QueryTile& q, KeyTile k, uint8_t* keep) {
  const uint64_t seed = p.rng_state[0], offset = p.rng_state[1];
  // The tile in coordinates of the whole sequence, widened to the 16 x 16 blocks that share words.
  const int64_t q0 = q.seq->q_origin + q.row, q1 = q0 + q.rows;
  const int64_t k0 = q.seq->k_origin + k.begin, k1 = k0 + k.cols;
  for (int64_t h = 0; h < q.heads; ++h) {
    const uint32_t batch_head = static_cast<uint32_t>(
        (q.seq->batch + p.batch_offset) * p.total_heads + q.head + h + p.head_offset);
    uint8_t* out = keep + h * q.rows * k.cols;
    for (int64_t qb = q0 / 16 * 16; qb < q1; qb += 16) {
      for (int64_t kb = k0 / 16 * 16; kb < k1; kb += 16) {
        for (int64_t pair = 0; pair < 64; ++pair) {
          const int64_t qr = qb + pair / 8, kr = kb + pair % 8;
          const PhiloxWords w = dropout_words(seed, offset, batch_head, static_cast<uint32_t>(qr),
                                              static_cast<uint32_t>(kr));
          for (int64_t n = 0; n < 4; ++n) {
            const int64_t row = qr + 8 * (n / 2) - q0, col = kr + 8 * (n % 2) - k0;
            if (row < 0 || row >= q.rows || col < 0 || col >= k.cols) continue;
            out[row * k.cols + col] = w.word[n] >= p.dropout_threshold;
          }
        }
      }
    }
  }
}

template void score_tile<float>(const AttentionParams&, const QueryTile&, KeyTile,
                                const at::Tensor&, const at::Tensor&, float*, float*);
template void score_tile<double>(const AttentionParams&, const QueryTile&, KeyTile,
                                 const at::Tensor&, const at::Tensor&, double*, double*);

}  // namespace flashbpt::cpu
