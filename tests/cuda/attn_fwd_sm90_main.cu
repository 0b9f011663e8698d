// Checks the Hopper forward without torch against loops in double: head dims, ratios of heads, odd
// lengths, causal at both alignments, windows, scales, sinks, scores that leave the range of the
// reference, bitwise repeats; then prints its rates. docs/attn_fwd_sm90.md has the command. Exit
// status 0: every check held, or the device is no Hopper GPU.
#include <random>

#include "../../csrc/sm90/attn_fwd/launch.h"
#include "harness.h"

namespace {

using flashbpt::AttentionParams;
using flashbpt::Band;
using flashbpt::DeviceLimits;

bool all_held = true;
DeviceLimits limits;
std::mt19937 random_bits(std::random_device{}());

struct Case {
  const char* what;
  int batch, heads_q, heads_kv, len_q, len_k, dim, dim_v;
  bool causal = false;
  int left = -1, right = -1;
  int diagonal = 0;
  double scale = 0;  // 0: 1 / sqrt(dim)
  bool sinks = false;
  double rise = 0;    // added to the scores from one tile of 64 keys to the one before
  double spread = 1;  // of q
};

template <typename T>
std::vector<T> draw(size_t count, double mean, double spread) {
  constexpr size_t kDrawn = 1 << 20;  // what is longer repeats
  std::normal_distribution<double> normal(mean, spread);
  std::vector<T> host(count);
  for (size_t i = 0; i < count; ++i)
    host[i] = i < kDrawn + 1 ? from_double<T>(normal(random_bits)) : host[i - kDrawn - 1];
  return host;
}

template <typename T>
struct Call {
  Case c;
  std::vector<T> q, k, v;
  std::vector<float> sinks;
  Array<T> q_gmem, k_gmem, v_gmem, out_gmem;
  Array<float> lse_gmem, sinks_gmem;
  Array<int32_t> counters;
  AttentionParams p;

  size_t out_size() const { return size_t(c.batch) * c.len_q * c.heads_q * c.dim_v; }
  size_t lse_size() const { return size_t(c.batch) * c.heads_q * c.len_q; }

  // [batch, length, heads, dim]
  static flashbpt::TensorView view(T* data, int length, int heads, int dim) {
    return {data, Type<T>::kDtype, int64_t{length} * heads * dim, dim, int64_t{heads} * dim, 1};
  }

  explicit Call(const Case& c)
      : c(c),
        q(draw<T>(size_t(c.batch) * c.len_q * c.heads_q * c.dim, 0.1, c.spread)),
        k(draw<T>(size_t(c.batch) * c.len_k * c.heads_kv * c.dim, 0.1, 1)),
        v(draw<T>(size_t(c.batch) * c.len_k * c.heads_kv * c.dim_v, 0.3, 1)),
        sinks(c.sinks ? draw<float>(c.heads_q, 1, 2) : std::vector<float>()),
        q_gmem((bend(), q)),
        k_gmem(k),
        v_gmem(v),
        out_gmem(out_size()),
        lse_gmem(lse_size()),
        sinks_gmem(sinks),
        counters(std::vector<int32_t>(2)) {
    p.q = view(q_gmem.data, c.len_q, c.heads_q, c.dim);
    p.k = view(k_gmem.data, c.len_k, c.heads_kv, c.dim);
    p.v = view(v_gmem.data, c.len_k, c.heads_kv, c.dim_v);
    p.out = view(out_gmem.data, c.len_q, c.heads_q, c.dim_v);
    p.lse = {
        lse_gmem.data, flashbpt::DataType::kFloat32, int64_t{c.heads_q} * c.len_q, c.len_q, 1, 0};
    if (c.sinks) p.sinks = {sinks_gmem.data, flashbpt::DataType::kFloat32, 0, 1, 0, 0};
    p.batch = c.batch, p.heads_q = c.heads_q, p.heads_kv = c.heads_kv;
    p.len_q = c.len_q, p.len_k = c.len_k, p.dim = c.dim, p.dim_v = c.dim_v;
    p.scale = scale();
    p.band = Band::from_flags(c.causal, c.left, c.right);
    p.diagonal = c.diagonal;
  }

  double scale() const { return c.scale != 0 ? c.scale : 1 / std::sqrt(double(c.dim)); }

  // Scores of later keys are higher by `rise` every 64 keys.
  void bend() {
    if (c.rise == 0) return;
    for (size_t i = 0; i < q.size(); i += c.dim) q[i] = from_double<T>(8);
    for (size_t i = 0; i < k.size(); i += c.dim) {
      const size_t key = i / c.dim / c.heads_kv % c.len_k;
      k[i] = from_double<T>(key / 64 * c.rise / 8 / scale());
    }
  }

  void launch() {
    flashbpt::sm90::launch_attn_fwd(p, {}, limits, counters.data, nullptr);
    check_cuda(cudaGetLastError(), "attn_fwd");
  }

  void check() {
    check_cuda(cudaMemset(out_gmem.data, 0xff, out_size() * sizeof(T)), "cudaMemset");
    check_cuda(cudaMemset(lse_gmem.data, 0xff, lse_size() * 4), "cudaMemset");
    launch();
    check_cuda(cudaDeviceSynchronize(), "attn_fwd");
    const auto out = out_gmem.host(out_size());
    const auto lse = lse_gmem.host(lse_size());
    double worst = 0, worst_lse = 0;
    for (int b = 0; b < c.batch; ++b)
      for (int h = 0; h < c.heads_q; ++h)
        for (int i = 0; i < c.len_q; ++i) check_row(b, h, i, out, lse, worst, worst_lse);
    launch();
    check_cuda(cudaDeviceSynchronize(), "attn_fwd");
    const int64_t changed = differ(out, out_gmem.host(out_size()));
    const auto left = counters.host(2);
    const bool held = worst <= 1 && worst_lse <= 1 && changed == 0 && left[0] == 0 && left[1] == 0;
    all_held = all_held && held;
    std::printf("%s %-34s %d x %2d/%d  %4d x %4d  d %3d/%3d  out %.3f  lse %.3f of the bound%s%s\n",
                Type<T>::kName, c.what, c.batch, c.heads_q, c.heads_kv, c.len_q, c.len_k, c.dim,
                c.dim_v, worst, worst_lse, changed ? "  CHANGES" : "", held ? "  ok" : "  WRONG");
  }

  void check_row(int b, int h, int i, const std::vector<T>& out, const std::vector<float>& lse,
                 double& worst, double& worst_lse) const {
    const int kv = h / (c.heads_q / c.heads_kv);
    const auto keys = p.band.of_row(i, c.diagonal, c.len_k);
    std::vector<double> s(c.len_k, -kInfinity);
    double top = c.sinks ? sinks[h] : -kInfinity;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      double sum = 0;
      for (int d = 0; d < c.dim; ++d)
        sum += to_double(q[((size_t(b) * c.len_q + i) * c.heads_q + h) * c.dim + d]) *
               to_double(k[((size_t(b) * c.len_k + j) * c.heads_kv + kv) * c.dim + d]);
      s[j] = sum * scale();
      top = std::max(top, s[j]);
    }
    double l = c.sinks ? std::exp(sinks[h] - top) : 0;
    std::vector<double> o(c.dim_v), size(c.dim_v);
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const double weight = std::exp(s[j] - top);
      l += weight;
      for (int d = 0; d < c.dim_v; ++d) {
        const double x =
            weight * to_double(v[((size_t(b) * c.len_k + j) * c.heads_kv + kv) * c.dim_v + d]);
        o[d] += x, size[d] += std::abs(x);
      }
    }
    const bool any = l > 0;
    for (int d = 0; d < c.dim_v; ++d) {
      const double right = any ? o[d] / l : 0,
                   got = to_double(out[((size_t(b) * c.len_q + i) * c.heads_q + h) * c.dim_v + d]);
      // P and the result are rounded once each; exponents of large scores lose digits.
      const double bound = Type<T>::kEps * ((any ? size[d] / l : 0) + std::abs(right)) +
                           1e-6 * (1 + (any ? std::abs(top) : 0));
      const double off = std::abs(got - right);
      worst = std::max(worst, std::isnan(off) ? kInfinity : off / bound);
    }
    const double right = any ? top + std::log(l) : -kInfinity;
    const double got = lse[(size_t(b) * c.heads_q + h) * c.len_q + i];
    const double off = std::isinf(right) ? (got == right ? 0 : kInfinity) : std::abs(got - right);
    worst_lse =
        std::max(worst_lse, std::isnan(off) ? kInfinity : off / (1e-5 * (1 + std::abs(top))));
  }
};

template <typename T>
void check_type() {
  const Case cases[] = {
      {"full", 2, 3, 3, 300, 333, 128, 128},
      {"causal", 2, 4, 2, 333, 333, 128, 128, true},
      {"causal, lower right", 1, 4, 1, 200, 500, 128, 128, true, -1, -1, 300},
      {"causal, rows without keys", 1, 2, 2, 500, 200, 128, 128, true, -1, -1, -300},
      {"window", 1, 2, 2, 600, 600, 128, 128, false, 100, 30},
      {"causal window", 1, 2, 2, 900, 900, 128, 128, true, 130, -1},
      {"sinks", 1, 4, 2, 150, 260, 128, 128, true, -1, -1, 0, 0, true},
      {"negative scale", 1, 2, 2, 130, 400, 128, 128, false, -1, -1, 0, -0.3},
      {"one row", 3, 2, 1, 1, 700, 128, 128},
      {"one key", 1, 2, 1, 70, 1, 128, 128},
      {"large scores", 1, 2, 2, 200, 900, 128, 128, false, -1, -1, 0, 0, false, 0, 20},
      {"scores that rise by 30", 1, 2, 2, 200, 900, 128, 128, false, -1, -1, 0, 0, false, 30},
      {"scores that rise by 50", 1, 2, 2, 200, 900, 64, 64, false, -1, -1, 0, 0, false, 50},
      {"scores that fall by 50", 1, 2, 2, 200, 900, 256, 256, true, -1, -1, 700, 0, false, -50},
      {"full", 2, 3, 1, 300, 333, 64, 64},
      {"causal", 1, 4, 2, 777, 777, 64, 64, true},
      {"causal", 1, 4, 2, 777, 777, 32, 56, true},
      {"full", 2, 3, 1, 300, 333, 256, 256},
      {"causal", 1, 4, 2, 500, 500, 256, 256, true},
      {"causal", 1, 4, 2, 300, 300, 192, 128, true},
      {"window", 1, 2, 2, 300, 600, 96, 80, true, 70, -1, 300},
      {"full", 1, 2, 2, 300, 600, 8, 120},
  };
  for (const Case& c : cases) Call<T>(c).check();
}

void time_case(int tokens, int len, int dim, bool causal) {
  const int heads = 2048 / dim;
  Call<__nv_bfloat16> call({"", tokens / len, heads, heads, len, len, dim, dim, causal});
  const double flops = 4.0 * call.c.batch * heads * len * double(len) * dim / (causal ? 2 : 1);
  for (int i = 0; i < 150e-3 / (flops / 650e12); ++i) call.launch();  // a cold chip is faster
  const double seconds = median_seconds([&](int) { call.launch(); });
  std::printf("d %3d  S %5d  %-6s  %.0f TFLOP/s\n", dim, len, causal ? "causal" : "full",
              flops / seconds * 1e-12);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp device;
  check_cuda(cudaGetDeviceProperties(&device, 0), "no GPU");
  if (device.major != 9) {
    std::printf("no Hopper GPU: nothing to check\n");
    return 0;
  }
  limits = {device.multiProcessorCount, static_cast<int>(device.sharedMemPerBlockOptin),
            device.l2CacheSize};
  check_type<__nv_bfloat16>();
  check_type<__half>();
  std::printf("%s\n", all_held ? "all checks held" : "CHECKS FAILED");
  for (const int dim : {64, 128, 256})
    for (const int len : {2048, 8192, 16384})
      for (const bool causal : {false, true}) time_case(16384, len, dim, causal);
  return all_held ? 0 : 1;
}
