// Checks and times the merge_states kernel alone, without torch. docs/merge_states.md has the
// commands. Exit status 0: every check held.
#include <random>

#include "../../csrc/sm80/merge_states/config.h"
#include "../../csrc/sm80/merge_states/launch.h"
#include "harness.h"

using flashbpt::DataType;
using flashbpt::sm80::kMaxMergeStates;
using flashbpt::sm80::MergeStatesParams;

namespace {

struct Case {
  int num_states;
  int64_t size[3];
  int64_t dim;
  bool heads_inside = false;  // out rows lie as [size 0, size 2, size 1], LSEs as [size 0, 1, 2]
  int64_t row_gap = 0;        // unused elements, NaN, after each out row
  int64_t first = 0;          // elements before the first out row
  double empty = 0.25;        // share of states without keys
  bool special = false;       // some LSEs are NaN or +inf
};

template <typename T>
struct States {
  using Acc = typename Type<T>::Acc;
  std::vector<std::vector<T>> outs;
  std::vector<std::vector<Acc>> lses;
  int64_t out_stride[3];
  int64_t lse_stride[3];

  States(const Case& c, std::mt19937_64& random) {
    const int64_t row = c.dim + c.row_gap;
    const int64_t rows = c.size[0] * c.size[1] * c.size[2];
    const int64_t strides[2][3] = {{c.size[1] * c.size[2] * row, c.size[2] * row, row},
                                   {c.size[1] * c.size[2] * row, row, c.size[1] * row}};
    std::copy_n(strides[c.heads_inside], 3, out_stride);
    lse_stride[0] = c.size[1] * c.size[2], lse_stride[1] = c.size[2], lse_stride[2] = 1;
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    for (int i = 0; i < c.num_states; ++i) {
      std::vector<T> out(c.first + rows * row, from_double<T>(kNan));
      std::vector<Acc> lse(rows);
      for (int64_t r = 0; r < rows; ++r) {
        const bool no_keys = uniform(random) < c.empty || r == rows / 2;
        lse[r] = static_cast<Acc>(no_keys ? -kInfinity : 5.0 * normal(random));
        if (c.special && uniform(random) < 0.05) lse[r] = static_cast<Acc>(kNan);
        if (c.special && uniform(random) < 0.05) lse[r] = static_cast<Acc>(kInfinity);
        for (int64_t d = 0; d < c.dim && !no_keys; ++d)
          out[c.first + out_offset(c, r) + d] = from_double<T>(1.0 + normal(random));
      }
      outs.push_back(std::move(out));
      lses.push_back(std::move(lse));
    }
  }

  int64_t out_offset(const Case& c, int64_t r) const {
    return r / (c.size[1] * c.size[2]) * out_stride[0] + r / c.size[2] % c.size[1] * out_stride[1] +
           r % c.size[2] * out_stride[2];
  }
};

// The kernel's result; more than kMaxMergeStates states go in groups, as the host does it.
template <typename T>
void merge_on_device(const Case& c, const States<T>& in, bool vectorised, std::vector<T>& out,
                     std::vector<typename Type<T>::Acc>& lse) {
  using Acc = typename Type<T>::Acc;
  MergeStatesParams p;
  std::copy_n(c.size, 3, p.shape.size);
  p.shape.rows = c.size[0] * c.size[1] * c.size[2];
  if (!c.heads_inside) {
    p.shape.size[0] = p.shape.size[1] = 1;
    p.shape.size[2] = p.shape.rows;
  }
  p.shape.dim = c.dim;
  p.shape.dtype = Type<T>::kDtype;
  p.vectorised = vectorised;
  std::vector<Array<T>*> outs;
  std::vector<Array<Acc>*> lses;
  for (int i = 0; i < c.num_states; ++i) {
    outs.push_back(new Array<T>(in.outs[i]));
    lses.push_back(new Array<Acc>(in.lses[i]));
  }
  Array<T> out_gmem(std::vector<T>(p.shape.rows * c.dim, from_double<T>(kNan)));
  Array<Acc> lse_gmem(std::vector<Acc>(p.shape.rows, static_cast<Acc>(kNan)));
  Array<Acc> sums_gmem(p.shape.rows * c.dim);
  Array<Acc> max_sum_gmem[2] = {Array<Acc>(p.shape.rows * 2), Array<Acc>(p.shape.rows * 2)};
  p.out = out_gmem.data;
  p.lse = lse_gmem.data;
  p.carry.sums = sums_gmem.data;
  for (int begin = 0, group = 0; begin < c.num_states; begin += kMaxMergeStates, ++group) {
    p.num_states = std::min(kMaxMergeStates, c.num_states - begin);
    for (int i = 0; i < p.num_states; ++i) {
      flashbpt::MergeState& state = p.states[i];
      state.out = outs[begin + i]->data + c.first;
      state.lse = lses[begin + i]->data;
      std::copy_n(in.out_stride, 3, state.out_stride);
      std::copy_n(in.lse_stride, 3, state.lse_stride);
    }
    const bool last = begin + p.num_states == c.num_states;
    p.carry.max_sum_in = begin == 0 ? nullptr : max_sum_gmem[(group + 1) % 2].data;
    p.carry.max_sum_out = last ? nullptr : max_sum_gmem[group % 2].data;
    flashbpt::sm80::launch_merge_states(p, nullptr);
    check_cuda(cudaGetLastError(), "launch");
  }
  check_cuda(cudaDeviceSynchronize(), "merge_states");
  out = out_gmem.host(p.shape.rows * c.dim);
  lse = lse_gmem.host(p.shape.rows);
  for (Array<T>* x : outs) delete x;
  for (Array<Acc>* x : lses) delete x;
}

// One case against a loop in double.
template <typename T>
bool check_case(const Case& c, std::mt19937_64& random) {
  using Acc = typename Type<T>::Acc;
  const States<T> in(c, random);
  constexpr int kWidth = 16 / sizeof(T);
  const bool vectorised = c.dim % kWidth == 0 && c.row_gap % kWidth == 0 && c.first % kWidth == 0;
  const double acc_eps = sizeof(Acc) == 8 ? 0x1p-48 : 0x1p-20;
  std::vector<T> out;
  std::vector<Acc> lse;
  merge_on_device(c, in, vectorised, out, lse);
  int64_t wrong = 0;
  double worst = 0;
  for (int64_t r = 0; r < static_cast<int64_t>(lse.size()); ++r) {
    double largest = -kInfinity, sum = 0;
    bool some_nan = false;
    for (const auto& one : in.lses) {
      some_nan = some_nan || std::isnan(one[r]);
      largest = std::max(largest, double(one[r]));
    }
    const bool number = !some_nan && largest != kInfinity;
    for (const auto& one : in.lses) sum += largest == -kInfinity ? 0 : std::exp(one[r] - largest);
    double right_lse = sum == 0 ? -kInfinity : largest + std::log(sum);
    if (!number) right_lse = some_nan ? kNan : kInfinity;
    wrong += !agrees(to_double(lse[r]), right_lse, acc_eps * (4 + std::abs(right_lse)));
    for (int64_t d = 0; d < c.dim; ++d) {
      double right = number ? 0 : kNan;
      for (int i = 0; i < c.num_states; ++i)
        if (number && in.lses[i][r] != -kInfinity)
          right += std::exp(in.lses[i][r] - right_lse) *
                   to_double(in.outs[i][c.first + in.out_offset(c, r) + d]);
      const double got = to_double(out[r * c.dim + d]);
      const double tolerance = Type<T>::kEps * (1 + std::abs(right)) + 8 * acc_eps;
      wrong += !agrees(got, right, tolerance);
      worst = std::max(worst, std::abs(got - right));
    }
  }
  std::printf("%s  n %3d  rows %2dx%2dx%4d  D %4d  %s%s  worst %.2e  %s\n", Type<T>::kName,
              c.num_states, int(c.size[0]), int(c.size[1]), int(c.size[2]), int(c.dim),
              vectorised ? "vector" : "scalar", c.heads_inside ? " strided" : "        ", worst,
              wrong == 0 ? "ok" : "WRONG");
  return wrong == 0;
}

template <typename T>
bool check_type(std::mt19937_64& random) {
  const Case cases[] = {
      {1, {1, 1, 7}, 64},
      {2, {1, 1, 1000}, 128},
      {2, {2, 3, 65}, 128, true},
      {3, {2, 3, 65}, 80, true, 16},
      {4, {1, 1, 333}, 96, false, 0, 0, 0.9},
      {5, {1, 1, 301}, 63},
      {5, {3, 5, 31}, 33, true},
      {7, {1, 1, 50}, 512, false, 32},
      {2, {1, 1, 9}, 5000},
      {2, {1, 1, 9}, 777},
      {3, {1, 1, 101}, 64, false, 0, 1},
      {2, {1, 1, 130}, 0},
      {2, {1, 1, 200000}, 1},
      {32, {1, 1, 40}, 128},
      {33, {1, 1, 40}, 128, false, 0, 0, 0.99},
      {40, {2, 4, 11}, 40, true},
      {300, {1, 1, 60}, 72},
      {300, {1, 1, 60}, 7},
      {70, {1, 1, 30}, 0},
      {70, {1, 1, 30}, 64, false, 0, 0, 1.0},
      {3, {1, 1, 500}, 64, false, 0, 0, 0.25, true},
      {2, {1, 1, 500}, 5, false, 0, 0, 0.5, true},
      {35, {1, 1, 100}, 16, false, 0, 0, 0.5, true},
  };
  bool ok = true;
  for (const Case& c : cases) ok = check_case<T>(c, random) && ok;
  return ok;
}

// Median time of one merge of contiguous states (or [batch, length, heads, D] ones), over sets of
// buffers that together exceed the L2 cache several times.
template <typename T>
void time_case(int num_states, int64_t heads, int64_t length, int64_t dim, bool heads_inside) {
  using Acc = typename Type<T>::Acc;
  const int64_t rows = heads * length;
  const double bytes = (num_states + 1.0) * rows * (dim * sizeof(T) + sizeof(Acc));
  const int sets = rotating_sets(bytes);
  std::vector<MergeStatesParams> params(sets);
  Arena arena;
  for (MergeStatesParams& p : params) {
    p.shape.dtype = Type<T>::kDtype;
    p.shape.dim = dim;
    p.shape.rows = rows;
    p.shape.size[1] = heads_inside ? heads : 1;
    p.shape.size[2] = heads_inside ? length : rows;
    p.num_states = num_states;
    p.vectorised = dim * sizeof(T) % 16 == 0;
    p.out = arena.take(rows * dim * sizeof(T));
    p.lse = arena.take(rows * sizeof(Acc));
    for (int i = 0; i < num_states; ++i) {
      flashbpt::MergeState& state = p.states[i];
      state.out = arena.take(rows * dim * sizeof(T));
      state.lse = arena.take(rows * sizeof(Acc));
      state.out_stride[1] = dim, state.out_stride[2] = heads_inside ? heads * dim : dim;
      state.lse_stride[1] = length, state.lse_stride[2] = 1;
    }
  }
  const double seconds = median_seconds(
      [&](int i) { flashbpt::sm80::launch_merge_states(params[i % sets], nullptr); });
  std::printf("%s  n %2d  rows %8lld%s  D %3d  %9.1f us  %7.1f MB  %.3f TB/s\n", Type<T>::kName,
              num_states, static_cast<long long>(rows), heads_inside ? " strided" : "        ",
              static_cast<int>(dim), seconds * 1e6, bytes * 1e-6, bytes / seconds * 1e-12);
}

}  // namespace

int main() {
  cudaDeviceProp device;
  check_cuda(cudaGetDeviceProperties(&device, 0), "no GPU");
  std::mt19937_64 random(std::random_device{}());
  bool ok = check_type<__nv_bfloat16>(random);
  ok = check_type<__half>(random) && ok;
  ok = check_type<float>(random) && ok;
  ok = check_type<double>(random) && ok;
  std::printf("%s\n%s\n", ok ? "all checks held" : "CHECKS FAILED", device.name);
  time_case<__nv_bfloat16>(2, 32, 32768, 128, false);
  time_case<__nv_bfloat16>(2, 32, 32768, 128, true);
  time_case<__nv_bfloat16>(2, 32, 32768, 64, false);
  time_case<__nv_bfloat16>(4, 32, 32768, 128, false);
  time_case<__nv_bfloat16>(8, 32, 16384, 128, false);
  time_case<__nv_bfloat16>(8, 32, 16384, 128, true);
  time_case<__nv_bfloat16>(32, 32, 4096, 128, false);
  time_case<__nv_bfloat16>(2, 32, 32768, 127, false);
  time_case<float>(2, 32, 16384, 128, false);
  time_case<double>(2, 32, 8192, 128, false);
  time_case<__nv_bfloat16>(8, 32, 16, 128, false);
  return ok ? 0 : 1;
}
