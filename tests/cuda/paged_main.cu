// Checks and times paged_decode alone, without torch. docs/paged.md has the
// commands. Exit status 0: every check held.
#include <random>

#include "../../csrc/sm80/paged_decode/launch.h"
#include "harness.h"

using namespace flashbpt;
using namespace flashbpt::sm80;

namespace {

using Random = std::mt19937_64;

struct Shape {
  std::vector<int> lens;
  int heads_q, heads_kv, dim, dim_v, page_size;
  int rows = 1;  // of every request
  bool causal = true;
  int64_t window = -1;
  double softcap = 0;
  bool sinks = false;
  // Few multiprocessors are left to the kernel: blocks wait for others that cannot begin.
  bool crowded = false;
};

__global__ void occupy(long long cycles) {
  for (const long long start = clock64(); clock64() - start < cycles;) continue;
}

DeviceLimits limits() {
  cudaDeviceProp device;
  check_cuda(cudaGetDeviceProperties(&device, 0), "no GPU");
  return {device.multiProcessorCount, static_cast<int>(device.sharedMemPerBlockOptin),
          device.l2CacheSize};
}

// The tables of a shape: pages in random order, entries past the used ones poisoned.
struct Table {
  std::vector<int> entries;
  int width = 0, pages = 0;
  Table(const Shape& s, Random& random) {
    for (int n : s.lens) {
      const int count = (n + s.page_size - 1) / s.page_size;
      width = std::max(width, count + 1);
      pages += count;
    }
    pages += 3;
    std::vector<int> order(pages);
    for (int i = 0; i < pages; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    entries.assign(s.lens.size() * width, 1 << 30);
    int at = 0;
    for (size_t b = 0; b < s.lens.size(); ++b)
      for (int i = 0; i * s.page_size < s.lens[b]; ++i) entries[b * width + i] = order[at++];
  }
};

template <typename T>
PagedDecodeParams params_of(const Shape& s, const Table& table) {
  PagedDecodeParams p;
  const int64_t tokens = int64_t(s.lens.size()) * s.rows;
  p.batch = s.lens.size(), p.tokens = tokens;
  p.heads_q = s.heads_q, p.heads_kv = s.heads_kv, p.dim = s.dim, p.dim_v = s.dim_v;
  p.max_len_q = s.rows;
  p.scale = 1 / std::sqrt(double(s.dim));
  p.softcap = s.softcap;
  p.band = Band::from_flags(s.causal, s.window, -1);
  p.q = {nullptr, Type<T>::kDtype, 0, s.dim, int64_t(s.heads_q) * s.dim, 1};
  p.out = {nullptr, Type<T>::kDtype, 0, s.dim_v, int64_t(s.heads_q) * s.dim_v, 1};
  p.lse = {nullptr, DataType::kFloat32, 0, 1, s.heads_q, 0};
  const auto cache = [&](int64_t dim) {
    return CacheView{nullptr,          CacheType::kSame,
                     table.pages,      s.page_size * s.heads_kv * dim,
                     s.heads_kv * dim, dim};
  };
  p.k = cache(s.dim), p.v = cache(s.dim_v);
  p.table.row_stride = table.width;
  p.table.page_size = s.page_size;
  plan_paged_decode(p, limits());
  static const Array<int32_t> barriers{std::vector<int32_t>(kPagedBarriers)};
  p.barriers = barriers.data;
  return p;
}

template <typename T>
bool check(const Shape& s, Random& random) {
  std::normal_distribution<float> normal;
  const Table table(s, random);
  PagedDecodeParams p = params_of<T>(s, table);
  const int64_t slots = int64_t(table.pages) * s.page_size;
  std::vector<T> q(p.tokens * s.heads_q * s.dim),
      k(slots * s.heads_kv * s.dim, from_double<T>(kNan)),
      v(slots * s.heads_kv * s.dim_v, from_double<T>(kNan));
  for (T& x : q) x = from_double<T>(normal(random));
  const auto slot = [&](int b, int key) {
    return int64_t(table.entries[b * table.width + key / s.page_size]) * s.page_size +
           key % s.page_size;
  };
  for (size_t b = 0; b < s.lens.size(); ++b)
    for (int key = 0; key < s.lens[b]; ++key) {
      for (int i = 0; i < s.heads_kv * s.dim; ++i)
        k[slot(b, key) * s.heads_kv * s.dim + i] = from_double<T>(normal(random));
      for (int i = 0; i < s.heads_kv * s.dim_v; ++i)
        v[slot(b, key) * s.heads_kv * s.dim_v + i] = from_double<T>(normal(random));
    }
  std::vector<float> sinks(s.heads_q);
  for (float& x : sinks) x = normal(random);
  std::vector<int> cu(s.lens.size() + 1);
  for (size_t b = 0; b < cu.size(); ++b) cu[b] = b * s.rows;
  const Array<T> q_gmem(q), k_gmem(k), v_gmem(v);
  const Array<T> out(std::vector<T>(p.tokens * s.heads_q * s.dim_v, from_double<T>(777)));
  const Array<float> lse(std::vector<float>(p.tokens * s.heads_q, 777)), sinks_gmem(sinks);
  const Array<int> entries(table.entries), lens(s.lens), cu_gmem(cu);
  const Array<float> workspace(std::vector<float>(p.workspace_bytes() / 4, kNan));
  p.q.data = q_gmem.data, p.k.data = k_gmem.data, p.v.data = v_gmem.data;
  p.out.data = out.data, p.lse.data = lse.data;
  p.table.entries.data = entries.data, p.table.seq_lens.data = lens.data;
  if (s.rows != 1) p.cu_seqlens_q.data = cu_gmem.data;
  if (s.sinks) p.sinks = {sinks_gmem.data, DataType::kFloat32, 0, 1, 0, 0};
  p.set_workspace(workspace.data);
  if (s.crowded) {
    const int bytes = limits().smem_bytes;
    check_cuda(cudaFuncSetAttribute(occupy, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "occupy");
    cudaStream_t other;
    check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
    occupy<<<limits().multiprocessors - 2, 1, bytes, other>>>(100'000'000);
    check_cuda(cudaStreamDestroy(other), "cudaStreamDestroy");
  }
  for (int i = 0; i < 3; ++i) launch_paged_decode(p, nullptr);
  check_cuda(cudaGetLastError(), "launch");
  check_cuda(cudaDeviceSynchronize(), "paged_decode");
  std::vector<int32_t> words(kPagedBarriers);
  check_cuda(cudaMemcpy(words.data(), p.barriers, words.size() * 4, cudaMemcpyDeviceToHost),
             "cudaMemcpy");
  for (int i = 0; i < kPagedBarriers; ++i)
    if (i < kMostBlocks ? words[i] & INT32_MAX : words[i]) {
      std::printf("word %d of the barriers was left as %d: WRONG\n", i, words[i]);
      return false;
    }
  const std::vector<T> got = out.host(p.tokens * s.heads_q * s.dim_v);
  const std::vector<float> got_lse = lse.host(p.tokens * s.heads_q);
  double worst = 0, worst_lse = 0;
  for (size_t b = 0; b < s.lens.size(); ++b)
    for (int i = 0; i < s.rows; ++i)
      for (int h = 0; h < s.heads_q; ++h) {
        const int64_t row = (b * s.rows + i) * s.heads_q + h;
        const int kv = h / (s.heads_q / s.heads_kv), at = s.lens[b] - s.rows + i;
        std::vector<double> score(s.lens[b], -kInfinity), right(s.dim_v, 0);
        double top = s.sinks ? sinks[h] : -kInfinity;
        for (int key = 0; key < s.lens[b]; ++key) {
          if ((s.causal && key > at) || (s.window >= 0 && key < at - s.window)) continue;
          double x = 0;
          for (int d = 0; d < s.dim; ++d)
            x += to_double(q[row * s.dim + d]) *
                 to_double(k[(slot(b, key) * s.heads_kv + kv) * s.dim + d]);
          x *= p.scale;
          if (s.softcap > 0) x = s.softcap * std::tanh(x / s.softcap);
          score[key] = x, top = std::max(top, x);
        }
        double sum = s.sinks ? std::exp(sinks[h] - top) : 0;
        for (int key = 0; key < s.lens[b]; ++key) {
          if (score[key] == -kInfinity) continue;
          const double weight = std::exp(score[key] - top);
          sum += weight;
          for (int d = 0; d < s.dim_v; ++d)
            right[d] += weight * to_double(v[(slot(b, key) * s.heads_kv + kv) * s.dim_v + d]);
        }
        for (int d = 0; d < s.dim_v; ++d) {
          const double x = sum > 0 ? right[d] / sum : 0;
          const double error = std::abs(to_double(got[row * s.dim_v + d]) - x);
          if (!(error <= worst)) worst = error;
        }
        const double l = sum > 0 ? top + std::log(sum) : -kInfinity;
        const double error = l == got_lse[row] ? 0 : std::abs(got_lse[row] - l);
        if (!(error <= worst_lse)) worst_lse = error;
      }
  const bool ok = worst < 8 * Type<T>::kEps && worst_lse < 2e-5 + Type<T>::kEps;
  std::printf(
      "%s  B %3zu  L %6d..%6d  H %d/%d  D %d/%d  rows %d  page %d%s%s%s%s  out %.1e  lse %.1e  "
      "%s\n",
      Type<T>::kName, s.lens.size(), *std::min_element(s.lens.begin(), s.lens.end()),
      *std::max_element(s.lens.begin(), s.lens.end()), s.heads_q, s.heads_kv, s.dim, s.dim_v,
      s.rows, s.page_size, s.window >= 0 ? "  window" : "", s.softcap > 0 ? "  softcap" : "",
      s.sinks ? "  sinks" : "", s.crowded ? "  crowded" : "", worst, worst_lse,
      ok ? "ok" : "WRONG");
  std::fflush(stdout);
  return ok;
}

// The rows of a table of uniform or given lengths; random bits would be slow to make: small values.
__global__ void fill(__nv_bfloat16* x, int64_t n, unsigned seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    unsigned h = static_cast<unsigned>(i * 2654435761u) ^ seed;
    h ^= h >> 15, h *= 0x85ebca6bu, h ^= h >> 13;
    x[i] = __float2bfloat16((h & 0xffff) / 32768.0f - 1.0f);
  }
}

void time_decode(const std::string& name, const Shape& s, const std::string& wanted,
                 Random& random) {
  if (name.rfind(wanted, 0) != 0) return;
  using T = __nv_bfloat16;
  const Table table(s, random);
  PagedDecodeParams p = params_of<T>(s, table);
  int64_t keys = 0;
  for (int n : s.lens) keys += n;
  const double bytes = 2.0 * keys * s.heads_kv * (s.dim + s.dim_v);
  const int64_t slots = int64_t(table.pages) * s.page_size;
  const int sets = std::max(1, std::min(8, int(300e6 / bytes) + 1));
  std::vector<PagedDecodeParams> params(sets, p);
  Arena arena;
  const Array<int> entries(table.entries), lens(s.lens);
  std::vector<int> cu(s.lens.size() + 1);
  for (size_t b = 0; b < cu.size(); ++b) cu[b] = b * s.rows;
  const Array<int> cu_gmem(cu);
  for (PagedDecodeParams& x : params) {
    const auto filled = [&](int64_t n) {
      T* data = arena.take<T>(n * 2);
      fill<<<1024, 256>>>(data, n, static_cast<unsigned>(random()));
      return data;
    };
    x.q.data = filled(p.tokens * s.heads_q * s.dim);
    x.k.data = filled(slots * s.heads_kv * s.dim);
    x.v.data = filled(slots * s.heads_kv * s.dim_v);
    x.out.data = filled(p.tokens * s.heads_q * s.dim_v);
    x.lse.data = arena.take<float>(p.tokens * s.heads_q * 4);
    x.set_workspace(arena.take<float>(p.workspace_bytes()));
    x.table.entries.data = entries.data, x.table.seq_lens.data = lens.data;
    if (s.rows != 1) x.cu_seqlens_q.data = cu_gmem.data;
  }
  const int count = std::max(sets, std::min(16, int(4e9 / bytes)));
  print_time(name,
             median_graph_seconds(count,
                                  [&](int i, cudaStream_t stream) {
                                    launch_paged_decode(params[i % sets], stream);
                                  }),
             bytes);
  std::fflush(stdout);
}

std::vector<int> random_lens(int count, int longest, Random& random) {
  std::vector<int> lens;
  for (int i = 0; i < count; ++i) lens.push_back(random() % 5 ? random() % longest : 0);
  return lens;
}

bool check_all(Random& random) {
  bool ok = true;
  for (const auto [heads_q, heads_kv] : {std::pair(4, 4), {8, 2}, {12, 4}, {14, 2}, {32, 1}})
    for (const int page : {1, 5, 16})
      ok &= check<__nv_bfloat16>({random_lens(9, 300, random), heads_q, heads_kv, 128, 128, page},
                                 random);
  for (const int dim : {32, 64, 80, 96, 128, 192, 256}) {
    ok &= check<__nv_bfloat16>({random_lens(5, 200, random), 8, 2, dim, dim, 16}, random);
    ok &= check<__half>({random_lens(5, 200, random), 8, 2, dim, dim, 8, 3}, random);
    if (dim <= 128) ok &= check<float>({random_lens(5, 200, random), 4, 2, dim, dim, 8, 2}, random);
  }
  ok &= check<__nv_bfloat16>({{9000}, 8, 2, 128, 128, 16}, random);
  Shape crowded{{40000, 5, 3000}, 32, 1, 128, 128, 16, 2};
  crowded.crowded = true;
  ok &= check<__nv_bfloat16>(crowded, random);
  ok &= check<__nv_bfloat16>({{20000, 3, 0, 700}, 16, 2, 128, 64, 16, 4}, random);
  ok &= check<__nv_bfloat16>({random_lens(300, 100, random), 4, 1, 64, 64, 4, 5, false}, random);
  ok &=
      check<__nv_bfloat16>({random_lens(20, 500, random), 8, 2, 128, 128, 16, 3, true, 70}, random);
  ok &= check<__nv_bfloat16>(
      {random_lens(20, 500, random), 8, 2, 64, 128, 16, 2, true, -1, 5.0, true}, random);
  ok &= check<float>({random_lens(20, 500, random), 8, 2, 64, 128, 16, 1, true, 33, 0.0, true},
                     random);
  std::printf("%s\n", ok ? "all checks held" : "CHECKS FAILED");
  return ok;
}

}  // namespace

// With an argument: times the cases whose names begin with it, and checks nothing.
int main(int count, char** arguments) {
  Random random(std::random_device{}());
  const std::string wanted = count > 1 ? arguments[1] : "";
  const bool ok = !wanted.empty() || check_all(random);
  Random same(0);  // as in benchmarks
  std::vector<int> skewed(4, 32768);
  for (int i = 0; i < 60; ++i) skewed.push_back(1 + same() % 2048);
  std::shuffle(skewed.begin(), skewed.end(), same);
  for (const auto [heads_q, heads_kv] : {std::pair(32, 32), {32, 8}, {64, 8}, {32, 1}})
    for (const auto& [b, length] : {std::pair(1, 8192),
                                    {1, 131072},
                                    {8, 32768},
                                    {64, 2048},
                                    {64, 8192},
                                    {128, 1024},
                                    {64, 0},
                                    {256, 512}}) {
      const std::vector<int> lens = length ? std::vector<int>(b, length) : skewed;
      const std::string name = std::to_string(heads_q) + "/" + std::to_string(heads_kv) + "  B " +
                               std::to_string(b) + "  S " +
                               (length ? std::to_string(length) : std::string("skewed"));
      time_decode(name, {lens, heads_q, heads_kv, 128, 128, 16}, wanted, random);
    }
  time_decode("32/8  B 64  S 8192  4 rows", {std::vector<int>(64, 8192), 32, 8, 128, 128, 16, 4},
              wanted, random);
  time_decode("64/8  B 8  S 32768  4 rows", {std::vector<int>(8, 32768), 64, 8, 128, 128, 16, 4},
              wanted, random);
  return ok ? 0 : 1;
}
