// out = sum_i w_i out_i, w_i = exp(lse_i - lse), lse = log sum_i exp(lse_i)
//
// Threads share the rows. A row reads all its LSEs first, so the weights are final before the first
// output row is touched; then the states are added one after the other into one row of sums.
#include "merge_states.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

namespace flashbpt::cpu {
namespace {

// Work a thread takes at least, in elements read.
constexpr int64_t kGrain = 32768;

// Element offset of row r.
int64_t row_offset(int64_t r, const int64_t* size, const int64_t* stride) {
  const int64_t i2 = r % size[2], rest = r / size[2];
  return (rest / size[1]) * stride[0] + (rest % size[1]) * stride[1] + i2 * stride[2];
}

template <typename T, typename Acc>
void add_scaled(Acc* sums, const T* x, Acc weight, int64_t n) {
  for (int64_t d = 0; d < n; ++d) sums[d] += weight * static_cast<Acc>(x[d]);
}

// weights: [num_states], lses of one row in, exp(lse_i - base) out. Returns the row's LSE and sets
// `sum` to the sum of the weights.
template <typename Acc>
Acc weights_of_row(std::vector<Acc>& weights, Acc& sum) {
  constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();
  Acc largest = -kInfinity;
  for (const Acc lse : weights) largest = lse > largest ? lse : largest;
  // Without a finite maximum 0 serves: empty rows sum to 0, an infinite LSE stays infinite.
  const Acc base = std::abs(largest) == kInfinity ? Acc(0) : largest;
  sum = 0;
  for (Acc& w : weights) sum += w = std::exp(w - base);
  return base + std::log(sum);
}

template <typename T, typename Acc>
void merge_rows(const MergeShape& shape, const MergeState* states, int64_t num_states, T* out,
                Acc* lse, int64_t begin, int64_t end) {
  constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();
  const int64_t dim = shape.dim;
  std::vector<Acc> weights(num_states), sums(dim);
  std::vector<char> empty(num_states);
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t i = 0; i < num_states; ++i) {
      weights[i] =
          static_cast<const Acc*>(states[i].lse)[row_offset(r, shape.size, states[i].lse_stride)];
      empty[i] = weights[i] == -kInfinity;
    }
    Acc sum;
    lse[r] = weights_of_row(weights, sum);
    std::fill(sums.begin(), sums.end(), Acc(0));
    for (int64_t i = 0; i < num_states; ++i) {
      if (empty[i]) continue;  // nobody wrote that output row: it may hold NaN
      add_scaled(
          sums.data(),
          static_cast<const T*>(states[i].out) + row_offset(r, shape.size, states[i].out_stride),
          weights[i], dim);
    }
    const Acc scale = sum == Acc(0) ? Acc(0) : Acc(1) / sum;
    for (int64_t d = 0; d < dim; ++d) out[r * dim + d] = static_cast<T>(sums[d] * scale);
  }
}

template <typename T, typename Acc>
void merge_all(const MergeShape& shape, const MergeState* states, int64_t num_states, void* out,
               void* lse) {
  const int64_t work_per_row = num_states * (shape.dim + 1);
  at::parallel_for(0, shape.rows, std::max<int64_t>(1, kGrain / work_per_row),
                   [&](int64_t begin, int64_t end) {
                     merge_rows(shape, states, num_states, static_cast<T*>(out),
                                static_cast<Acc*>(lse), begin, end);
                   });
}

}  // namespace

void merge_states(const MergeShape& shape, const MergeState* states, int64_t num_states, void* out,
                  void* lse) {
  switch (shape.dtype) {
    case DataType::kFloat64:
      return merge_all<double, double>(shape, states, num_states, out, lse);
    case DataType::kFloat32:
      return merge_all<float, float>(shape, states, num_states, out, lse);
    case DataType::kBFloat16:
      return merge_all<c10::BFloat16, float>(shape, states, num_states, out, lse);
    case DataType::kFloat16:
      return merge_all<c10::Half, float>(shape, states, num_states, out, lse);
    case DataType::kBool:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "merge_states: no kernel for this dtype");
}

}  // namespace flashbpt::cpu
