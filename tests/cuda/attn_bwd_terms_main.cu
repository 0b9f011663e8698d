// Checks and times the kernel of the terms' gradients alone, without torch: what it takes from
// other kernels (LSE, delta, the classes of a boolean mask) comes from the host, in double.
// docs/attn_bwd_terms.md has the command. Exit status 0: every check held.
#include <memory>
#include <random>

#include "../../csrc/attention/philox.h"
#include "../../csrc/sm80/attn_bwd_terms/launch.h"
#include "harness.h"

using namespace flashbpt;
using namespace flashbpt::sm80;

namespace {

using Random = std::mt19937_64;

enum class Mask { kNone, kSame, kFloat, kBool };  // kSame: of q's type

struct Shape {
  int64_t batch, heads, heads_kv, len_q, len_k, dim, dim_v;
};

struct Terms {
  const char* dims = "1111";  // of the mask: '1' where it is broadcast
  Mask mask = Mask::kNone;
  bool transposed = false;  // boolean masks: queries and keys change places in memory
  bool dead_rows = false;   // the mask hides all keys of every fifth row
  bool alibi = false;
  Band band = {};
  double softcap = 0, dropout = 0;
  int64_t gap = 0;  // elements that are not used, between rows and before the first
  std::vector<int64_t> lens_q = {}, lens_k = {};  // packed
};

struct Case : Shape, Terms {
  bool tf32 = false;
  bool packed() const { return !lens_q.empty(); }
};

// [batch, heads, rows, cols] on host and device; NaN in the gaps.
template <typename T>
struct Tensor {
  std::vector<T> x;
  TensorView view;
  std::unique_ptr<Array<T>> device;

  Tensor(int64_t batch, int64_t heads, int64_t rows, int64_t cols, int64_t gap = 0)
      : x(gap + batch * heads * rows * (cols + gap), from_double<T>(kNan)) {
    const int64_t row = cols + gap, head = rows * row;
    view = {nullptr,
            Type<T>::kDtype,
            batch > 1 ? heads * head : 0,
            heads > 1 ? head : 0,
            rows > 1 ? row : 0,
            cols > 1 ? 1 : 0};
    first = gap;
  }
  T& at(int64_t b, int64_t h, int64_t r, int64_t c) {
    return x[first + b * view.batch + h * view.head + r * view.row + c * view.col];
  }
  void send(TensorView& to) {
    device = std::make_unique<Array<T>>(x);
    to = view;
    to.data = device->data + first;
  }
  int64_t first;
};

template <typename T, typename F>
void fill(Tensor<T>& t, int64_t batch, int64_t heads, int64_t rows, int64_t cols, F value) {
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) t.at(b, h, r, c) = from_double<T>(value(r));
}

std::vector<int64_t> sums(const std::vector<int64_t>& lens) {
  std::vector<int64_t> cu{0};
  for (int64_t len : lens) cu.push_back(cu.back() + len);
  return cu;
}

// Inputs of a case, and its gradients in double with what rounding may change of them.
template <typename T>
struct Problem {
  const Case& c;
  AttnBwdParams p;  // of the device
  Tensor<T> q, k, v, grad_out, mask_same;
  Tensor<float> mask_float, slopes;
  std::vector<uint8_t> mask_bool, tiles;
  std::vector<int64_t> cu_q, cu_k;
  int64_t sizes[4];  // of the mask
  std::vector<double> dmask, dmask_range, dalibi, dalibi_range;
  std::vector<float> lse, lse_lo, delta;
  std::vector<bool> seen;  // keys that some row sees, [outer, heads_kv, len_k]
  std::vector<std::unique_ptr<Array<uint8_t>>> bytes;
  std::vector<std::unique_ptr<Array<float>>> floats;
  std::vector<std::unique_ptr<Array<int64_t>>> ints;

  bool is_full(int d) const { return c.mask != Mask::kNone && c.dims[d] != '1'; }
  int64_t size(int d, int64_t full) const { return is_full(d) ? full : 1; }
  int64_t outer() const { return c.packed() ? 1 : c.batch; }
  bool additive() const { return c.mask == Mask::kSame || c.mask == Mask::kFloat; }

  Problem(const Case& c, Random& random)
      : c(c),
        q(outer(), c.heads, c.len_q, c.dim, c.gap),
        k(outer(), c.heads_kv, c.len_k, c.dim, c.gap),
        v(outer(), c.heads_kv, c.len_k, c.dim_v, c.gap),
        grad_out(outer(), c.heads, c.len_q, c.dim_v, c.gap),
        mask_same(size(0, c.batch), size(1, c.heads), size(2, c.len_q), size(3, c.len_k), c.gap),
        mask_float(size(0, c.batch), size(1, c.heads), size(2, c.len_q), size(3, c.len_k), c.gap),
        slopes(c.batch, 1, 1, c.heads),
        cu_q(sums(c.lens_q)),
        cu_k(sums(c.lens_k)),
        sizes{size(0, c.batch), size(1, c.heads), size(2, c.len_q), size(3, c.len_k)} {
    std::normal_distribution<double> normal;
    const auto some = [&](int64_t) { return normal(random); };
    fill(q, outer(), c.heads, c.len_q, c.dim, some);
    fill(k, outer(), c.heads_kv, c.len_k, c.dim, some);
    fill(v, outer(), c.heads_kv, c.len_k, c.dim_v, some);
    fill(grad_out, outer(), c.heads, c.len_q, c.dim_v, some);
    fill(slopes, c.batch, 1, 1, c.heads, [&](int64_t) { return 0.1 * std::abs(normal(random)); });
    const auto bias = [&](int64_t row) {
      return (c.dead_rows && row % 5 == 2) || random() % 8 == 0 ? -kInfinity : normal(random);
    };
    fill(mask_same, sizes[0], sizes[1], sizes[2], sizes[3], bias);
    fill(mask_float, sizes[0], sizes[1], sizes[2], sizes[3], bias);
    set_params();
    reference(random);
    for (size_t i = 0; i < seen.size(); ++i) {
      const int64_t b = i / c.len_k / c.heads_kv, h = i / c.len_k % c.heads_kv, j = i % c.len_k;
      for (int64_t d = 0; d < c.dim && !seen[i]; ++d) k.at(b, h, j, d) = from_double<T>(kNan);
      for (int64_t d = 0; d < c.dim_v && !seen[i]; ++d) v.at(b, h, j, d) = from_double<T>(kNan);
    }
    send();
  }

  // What the host knows; `send` adds the pointers.
  void set_params() {
    p.batch = c.packed() ? static_cast<int64_t>(c.lens_q.size()) : c.batch;
    p.heads_q = p.total_heads = c.heads;
    p.heads_kv = c.heads_kv;
    p.len_q = c.len_q;
    p.len_k = c.len_k;
    p.dim = c.dim;
    p.dim_v = c.dim_v;
    p.scale = 1.3 / std::sqrt(static_cast<double>(c.dim));
    p.softcap = c.softcap;
    p.band = c.band;
    p.diagonal = c.packed() ? 0 : c.len_k - c.len_q;
    p.dropout_threshold = static_cast<uint64_t>(std::ceil(c.dropout * 4294967296.0));
    p.dropout_scale = 1 / (1 - c.dropout);
    p.tf32 = c.tf32;
    p.cu_seqlens_int64 = true;
    if (c.packed()) p.cu_seqlens_q = cu_q.data(), p.cu_seqlens_k = cu_k.data();
    seen.assign(outer() * c.heads_kv * c.len_k, false);
    lse.assign(padded_heads(p) * padded_rows(p), kInfinity);
    lse_lo.assign(lse.size(), 0);
    delta.assign(lse.size(), 0);
    dmask.assign(sizes[0] * sizes[1] * sizes[2] * sizes[3], 0);
    dmask_range = dmask;
    dalibi.assign(c.batch * c.heads, 0);
    dalibi_range = dalibi;
  }

  double mask_at(int64_t b, int64_t h, int64_t r, int64_t col) {
    if (c.mask == Mask::kSame) return to_double(mask_same.at(b, h, r, col));
    const double x = mask_float.at(b, h, r, col);
    return c.mask == Mask::kFloat ? x : (x == -kInfinity ? x : 0);
  }

  void reference(Random& random) {
    const int64_t batch = c.packed() ? c.lens_q.size() : c.batch;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < c.heads; ++h) {
        const Sequence seq = sequence_of(p, b);
        for (int64_t i = 0; i < seq.len_q; ++i) reference_row(seq, h, i, random);
      }
  }

  void reference_row(const Sequence& seq, int64_t h, int64_t i, Random& random) {
    const int64_t kv = h / p.group(), b = c.packed() ? 0 : seq.batch, row = seq.q_begin + i;
    const double slope = c.alibi ? slopes.at(seq.batch % c.batch, 0, 0, h) : 0;
    std::vector<double> x(seq.len_k, -kInfinity), dp(seq.len_k), dp_range(seq.len_k),
        keep(seq.len_k, 1);
    double most = -kInfinity, sum = 0, dot = 0;
    for (int64_t j = 0; j < seq.len_k; ++j) {
      if (j < i + seq.shift - c.band.left || j > i + seq.shift + c.band.right) continue;
      seen[(b * c.heads_kv + kv) * c.len_k + seq.k_begin + j] = true;
      double s = 0;
      for (int64_t d = 0; d < c.dim; ++d)
        s += to_double(q.at(b, h, row, d)) * to_double(k.at(b, kv, seq.k_begin + j, d));
      s *= p.scale;
      if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
      s -= slope * std::abs(i + seq.shift - j);
      if (c.mask != Mask::kNone) s += mask_at(seq.batch, h, i, j);
      x[j] = s;
      most = std::max(most, s);
      for (int64_t d = 0; d < c.dim_v; ++d) {
        const double product =
            to_double(grad_out.at(b, h, row, d)) * to_double(v.at(b, kv, seq.k_begin + j, d));
        dp[j] += product;
        dp_range[j] += std::abs(product);
      }
      if (p.dropout_threshold == 0) continue;
      const PhiloxWords words = dropout_words(77, 5, seq.batch * c.heads + h, i, j);
      keep[j] =
          words.word[2 * (i / 8 % 2) + j / 8 % 2] >= p.dropout_threshold ? p.dropout_scale : 0;
    }
    if (most == -kInfinity) {  // a row without keys: whatever arrives for it
      for (int64_t d = 0; d < c.dim_v; ++d) grad_out.at(b, h, row, d) = from_double<T>(kNan);
      return;
    }
    for (double s : x) sum += std::exp(s - most);
    const double log_sum = most + std::log(sum);
    for (int64_t j = 0; j < seq.len_k; ++j) dot += std::exp(x[j] - log_sum) * keep[j] * dp[j];
    dot -= std::normal_distribution<double>()(random);  // the gradient of LSE
    const int64_t at = padded_head(p, seq.batch, h) * padded_rows(p) + padded_row_begin(p, seq) + i;
    lse[at] = static_cast<float>(log_sum);
    lse_lo[at] = static_cast<float>(log_sum - lse[at]);
    delta[at] = static_cast<float>(dot);
    for (int64_t j = 0; j < seq.len_k; ++j) {
      const double prob = std::exp(x[j] - log_sum), ds = prob * (keep[j] * dp[j] - dot);
      const double range = prob * (keep[j] * dp_range[j] + std::abs(dot));
      const double distance = std::abs(i + seq.shift - j);
      const int64_t slope_at = (c.batch > 1 ? seq.batch : 0) * c.heads + h;
      dalibi[slope_at] -= ds * distance;
      dalibi_range[slope_at] += range * distance;
      if (c.mask == Mask::kNone) continue;
      const int64_t m =
          ((seq.batch % sizes[0] * sizes[1] + h % sizes[1]) * sizes[2] + i % sizes[2]) * sizes[3] +
          j % sizes[3];
      dmask[m] += ds;
      dmask_range[m] += range;
    }
  }

  void send_bool() {
    // Queries and keys may change places in memory.
    const int64_t strides[4] = {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3],
                                c.transposed ? 1 : sizes[3], c.transposed ? sizes[2] : 1};
    const int64_t rows = (sizes[2] + 63) / 64, cols = (sizes[3] + 15) / 16;
    mask_bool.assign(dmask.size(), 0);
    tiles.assign(sizes[0] * sizes[1] * rows * cols, 2);
    for (int64_t b = 0; b < sizes[0]; ++b)
      for (int64_t h = 0; h < sizes[1]; ++h)
        for (int64_t r = 0; r < sizes[2]; ++r)
          for (int64_t k = 0; k < sizes[3]; ++k) {
            const bool seen = mask_float.at(b, h, r, k) != -kInfinity;
            mask_bool[b * strides[0] + h * strides[1] + r * strides[2] + k * strides[3]] = seen;
            uint8_t& tile = tiles[((b * sizes[1] + h) * rows + r / 64) * cols + k / 16];
            tile = seen ? tile | 1 : tile & 1;
          }
    for (const auto* x : {&mask_bool, &tiles})
      bytes.push_back(std::make_unique<Array<uint8_t>>(*x));
    const auto stride = [&](int d, int64_t s) { return sizes[d] > 1 ? s : 0; };
    p.mask = {bytes[0]->data,        DataType::kBool,       stride(0, strides[0]),
              stride(1, strides[1]), stride(2, strides[2]), stride(3, strides[3])};
    p.mask_tiles = {bytes[1]->data, stride(0, sizes[1] * rows * cols), stride(1, rows * cols),
                    rows > 1 ? cols : 0, cols > 1 ? 1 : 0};
  }

  void send() {
    q.send(p.q);
    k.send(p.k);
    v.send(p.v);
    grad_out.send(p.grad_out);
    if (c.alibi) {
      slopes.send(p.alibi);
      p.alibi.head = 1;
      p.alibi.col = 0;
    }
    if (c.mask == Mask::kSame) mask_same.send(p.mask);
    if (c.mask == Mask::kFloat) mask_float.send(p.mask);
    if (c.mask == Mask::kBool) send_bool();
    float** const to[3] = {&p.row_lse, &p.row_delta, &p.row_lse_lo};
    const std::vector<float>* const from[3] = {&lse, &delta, &lse_lo};
    for (int i = 0; i < (additive() ? 3 : 2); ++i) {
      floats.push_back(std::make_unique<Array<float>>(*from[i]));
      *to[i] = floats.back()->data;
    }
    for (const auto& x : {std::vector<int64_t>{77, 5}, cu_q, cu_k})
      ints.push_back(std::make_unique<Array<int64_t>>(x));
    p.rng_state = ints[0]->data;
    if (c.packed()) p.cu_seqlens_q = ints[1]->data, p.cu_seqlens_k = ints[2]->data;
  }

  // dmask, then dalibi summed over its partials.
  std::vector<float> run(const DeviceLimits& limits, bool deterministic) {
    AttnBwdParams call = p;
    call.deterministic = deterministic;
    const Array<float> dmask_device(std::vector<float>(dmask.size(), 0.0f));
    const int64_t strides[4] = {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
    const auto stride = [&](int d) { return sizes[d] > 1 ? strides[d] : 0; };
    if (additive())
      call.dmask = {dmask_device.data, DataType::kFloat32, stride(0),
                    stride(1),         stride(2),          stride(3)};
    const int64_t parts = attn_bwd_terms_partials(p, limits), entries = p.batch * c.heads;
    const Array<float> dalibi_device(std::vector<float>(parts * entries, 0.0f));
    if (c.alibi) call.dalibi = {dalibi_device.data, DataType::kFloat32, c.heads, 1, entries, 0};
    launch_attn_bwd_terms(call, limits, nullptr);
    check_cuda(cudaGetLastError(), "launch");
    check_cuda(cudaDeviceSynchronize(), "kernel");
    std::vector<float> got = dmask_device.host(additive() ? dmask.size() : 0);
    const std::vector<float> partial = dalibi_device.host(parts * entries);
    if (!c.alibi) return got;
    got.resize(got.size() + dalibi.size());
    for (int64_t i = 0; i < parts * entries; ++i)
      got[got.size() - dalibi.size() + i % entries % dalibi.size()] += partial[i];
    return got;
  }
};

template <typename T>
void check(const Case& c, const DeviceLimits& limits, Random& random, bool* ok) {
  Problem<T> problem(c, random);
  std::vector<double> right, range;
  if (problem.additive()) right = problem.dmask, range = problem.dmask_range;
  if (c.alibi) {
    right.insert(right.end(), problem.dalibi.begin(), problem.dalibi.end());
    range.insert(range.end(), problem.dalibi_range.begin(), problem.dalibi_range.end());
  }
  const std::vector<float> fixed = problem.run(limits, true), free = problem.run(limits, false);
  const double eps = c.tf32 ? 2e-2 : 1e-5;
  double worst = 0;
  int64_t wrong = differ(fixed, problem.run(limits, true));
  for (size_t i = 0; i < right.size(); ++i)
    for (const float got : {fixed[i], free[i]}) {
      wrong += !agrees(got, right[i], eps * range[i] + 1e-7);
      worst = std::max(worst, std::abs(got - right[i]) / (range[i] + 1e-3));
    }
  std::printf(
      "%s  B %2lld  H %2lld/%lld  L %4lld x %4lld  D %3lld/%3lld  %4s%s%s%s%s%s%s  %.1e  %s\n",
      Type<T>::kName, (long long)c.batch, (long long)c.heads, (long long)c.heads_kv,
      (long long)c.len_q, (long long)c.len_k, (long long)c.dim, (long long)c.dim_v, c.dims,
      c.mask == Mask::kFloat ? " fp32" : (c.mask == Mask::kBool ? " bool" : ""),
      c.alibi ? " alibi" : "", c.band.limits() ? " band" : "", c.softcap > 0 ? " cap" : "",
      c.dropout > 0 ? " drop" : "", c.packed() ? " packed" : "", worst,
      wrong == 0 ? "ok" : "WRONG");
  if (wrong != 0) *ok = false;
}

std::vector<Case> cases() {
  const Band causal = Band::from_flags(true, -1, -1), window = Band::from_flags(false, 40, 9);
  std::vector<Case> list;
  const auto add = [&](Shape shape, Terms terms) { list.push_back({shape, terms}); };
  for (const char* dims : {"BHQK", "1HQK", "B1QK", "11QK", "BH1K", "B11K", "111K", "BHQ1", "1HQ1",
                           "11Q1", "BH11", "1111"})
    add({2, 4, 2, 75, 130, 32, 24}, {.dims = dims, .mask = Mask::kSame});
  add({1, 2, 1, 1, 70, 64, 64}, {.dims = "B1QK", .mask = Mask::kFloat});
  add({2, 2, 2, 64, 64, 64, 64}, {.dims = "BHQK", .mask = Mask::kFloat, .band = causal});
  add({2, 2, 1, 150, 70, 40, 64},
      {.dims = "1HQK", .mask = Mask::kFloat, .alibi = true, .band = causal});
  add({1, 2, 1, 150, 170, 20, 30}, {.dims = "11QK",
                                    .mask = Mask::kSame,
                                    .dead_rows = true,
                                    .alibi = true,
                                    .band = window,
                                    .softcap = 3,
                                    .dropout = 0.3,
                                    .gap = 1});
  add({2, 2, 2, 70, 90, 7, 9}, {.dims = "B1QK", .mask = Mask::kFloat, .dead_rows = true, .gap = 3});
  for (const char* dims : {"1HQK", "BH1K"})
    add({2, 2, 1, 20, 200, 64, 64},
        {.dims = dims, .mask = Mask::kSame, .alibi = true, .band = {5, 0}});
  add({2, 2, 1, 130, 200, 16, 16},
      {.dims = "B1QK", .mask = Mask::kBool, .dead_rows = true, .alibi = true});
  add({2, 2, 1, 70, 200, 16, 16},
      {.dims = "11QK", .mask = Mask::kBool, .transposed = true, .alibi = true, .band = causal});
  add({1, 2, 1, 70, 70, 100, 128},
      {.dims = "1HQK", .mask = Mask::kSame, .alibi = true, .dropout = 0.5});
  add({1, 1, 1, 70, 70, 200, 256}, {.dims = "1HQK", .mask = Mask::kFloat, .alibi = true});
  add({2, 1, 1, 70, 70, 300, 130},
      {.dims = "1HQK", .mask = Mask::kFloat, .dead_rows = true, .alibi = true});
  add({1, 4, 2, 213, 262, 64, 64}, {.alibi = true,
                                    .band = causal,
                                    .lens_q = {0, 70, 1, 64, 0, 78},
                                    .lens_k = {5, 70, 0, 128, 3, 56}});
  add({1, 2, 2, 213, 213, 24, 40}, {.alibi = true,
                                    .band = window,
                                    .dropout = 0.2,
                                    .gap = 2,
                                    .lens_q = {100, 13, 100},
                                    .lens_k = {100, 13, 100}});
  return list;
}

// Of a call with a mask of these dimensions, or with ALiBi.
void time_terms(const char* dims, int64_t len, int64_t dim, const DeviceLimits& limits) {
  constexpr int64_t kBatch = 2, kHeads = 16;
  Arena arena;
  AttnBwdParams p;
  p.batch = kBatch;
  p.heads_q = p.heads_kv = kHeads;
  p.len_q = p.len_k = len;
  p.dim = p.dim_v = dim;
  for (TensorView* t : {&p.q, &p.k, &p.v, &p.grad_out})
    *t = {arena.take(kBatch * kHeads * len * dim * 2),
          DataType::kBFloat16,
          kHeads * len * dim,
          len * dim,
          dim,
          1};
  for (float** x : {&p.row_lse, &p.row_delta, &p.row_lse_lo})
    *x = arena.take<float>(kBatch * kHeads * (len + kRowPad) * 4);
  if (*dims) {
    const int64_t b = dims[0] != '1', h = dims[1] != '1', q = dims[2] != '1', k = dims[3] != '1';
    const int64_t row = k ? len : 1, head = row * (q ? len : 1), batch = head * (h ? kHeads : 1);
    p.mask = {arena.take(batch * kBatch * 2), DataType::kBFloat16, b * batch, h * head, q * row, k};
    p.dmask = p.mask;
    p.dmask.dtype = DataType::kFloat32;
    p.dmask.data = arena.take(batch * kBatch * 4);
  } else {
    const int64_t parts = attn_bwd_terms_partials(p, limits);
    p.alibi = {arena.take(kHeads * 4), DataType::kFloat32, 0, 1, 0, 0};
    p.dalibi = {
        arena.take(parts * kBatch * kHeads * 4), DataType::kFloat32, kHeads, 1, kBatch * kHeads, 0};
  }
  const double seconds = median_seconds([&](int) { launch_attn_bwd_terms(p, limits, nullptr); });
  std::printf("bf16  B %lld  H %lld  L %5lld  D %3lld  %-5s  %9.1f us  %6.1f TFLOP/s\n",
              (long long)kBatch, (long long)kHeads, (long long)len, (long long)dim,
              *dims ? dims : "alibi", seconds * 1e6,
              4e-12 * kBatch * kHeads * len * len * dim / seconds);
}

}  // namespace

int main() {
  cudaDeviceProp gpu;
  check_cuda(cudaGetDeviceProperties(&gpu, 0), "cudaGetDeviceProperties");
  Random random(20);
  bool ok = true;
  DeviceLimits limits = {gpu.multiProcessorCount, static_cast<int>(gpu.sharedMemPerBlockOptin),
                         gpu.l2CacheSize};
  const DeviceLimits small = {limits.multiprocessors, 99 * 1024, limits.l2_bytes};
  for (Case c : cases()) {
    check<__nv_bfloat16>(c, limits, random, &ok);
    check<__half>(c, c.dim > 128 ? small : limits, random, &ok);
    check<float>(c, small, random, &ok);
    c.tf32 = true;
    check<float>(c, limits, random, &ok);
  }
  std::printf("%s\n", ok ? "all checks held" : "some checks FAILED");
  for (const int64_t dim : {64, 128, 256})
    for (const char* dims : {"1HQK", "BHQK", "B11K", ""})
      for (const int64_t len : {2048, 8192}) time_terms(dims, len, dim, limits);
  return ok ? 0 : 1;
}
