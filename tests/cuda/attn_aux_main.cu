// Checks and times the kernels around the sm80 backward alone, without torch: attn_bwd_prepare,
// attn_bwd_finish, the device's search for sequences and the order of tiles. Their pages in docs
// have the commands. Exit status 0: every check held.
#include <random>

#include "../../csrc/attention/find_sequence.h"
#include "../../csrc/attention/tile_order.h"
#include "../../csrc/sm80/attn_bwd_finish/launch.h"
#include "../../csrc/sm80/attn_bwd_prepare/launch.h"
#include "harness.h"

using namespace flashbpt;
using namespace flashbpt::sm80;

namespace {

using Random = std::mt19937_64;

// How a [batch, heads, rows, cols] tensor lies in memory.
struct Layout {
  bool heads_inside = false;  // as [batch, rows, heads, cols]
  int64_t gap = 0;            // unused elements after each row
  int64_t first = 0;          // and before the first
};

// The rows of a call. lens: of packed sequences, which q holds from q_offset on, len_q of them.
struct Shape {
  int64_t batch, heads, len_q, dim;
  std::vector<int64_t> lens = {};
  int64_t q_offset = 0;
  bool int64 = false;
  Layout layout = {}, grad_layout = {};
  bool terms = true;  // with lse_lo, dLSE and sinks

  bool packed() const { return !lens.empty(); }
  int64_t outer() const { return packed() ? 1 : batch; }
  int64_t rows() const { return outer() * heads * len_q; }
  int64_t size(const Layout& l) const { return l.first + rows() * (dim + l.gap); }
};

TensorView view_of(const Shape& s, const Layout& l, void* data, DataType dtype) {
  const int64_t row = s.dim + l.gap;
  return {static_cast<char*>(data) + l.first * element_bytes(dtype),
          dtype,
          s.packed() ? 0 : s.heads * s.len_q * row,
          l.heads_inside ? row : s.len_q * row,
          l.heads_inside ? s.heads * row : row,
          1};
}

int64_t offset(const TensorView& t, int64_t b, int64_t h, int64_t row) {
  return b * t.batch + h * t.head + row * t.row;
}

// Written apart from csrc/attention: what the kernels should find.
struct HostSequence {
  int64_t b, q_begin, len, padded_begin, k_begin, len_k;
};
std::vector<HostSequence> sequences(const Shape& s) {
  std::vector<HostSequence> found;
  if (!s.packed())
    for (int64_t b = 0; b < s.batch; ++b) found.push_back({b, 0, s.len_q, 0, 0, 0});
  int64_t token = 0;
  for (size_t b = 0; b < s.lens.size(); token += s.lens[b++]) {
    const int64_t begin = std::max<int64_t>(token - s.q_offset, 0);
    const int64_t end = std::min(token + s.lens[b] - s.q_offset, s.len_q);
    found.push_back({static_cast<int64_t>(b), begin, std::max<int64_t>(end - begin, 0),
                     (begin + kRowPad * static_cast<int64_t>(b)) / kRowPad * kRowPad, token,
                     s.lens[b]});
  }
  return found;
}

// cu_seqlens of a shape on the device, in either type.
struct CuSeqlens {
  Array<int64_t> wide;
  Array<int32_t> narrow;
  bool int64;

  static std::vector<int64_t> sums(const std::vector<int64_t>& lens) {
    std::vector<int64_t> cu{0};
    for (int64_t len : lens) cu.push_back(cu.back() + len);
    return cu;
  }
  explicit CuSeqlens(const Shape& s)
      : wide(sums(s.lens)),
        narrow([&] {
          const auto cu = sums(s.lens);
          return std::vector<int32_t>(cu.begin(), cu.end());
        }()),
        int64(s.int64) {}
  const void* data() const { return int64 ? static_cast<void*>(wide.data) : narrow.data; }
};

AttnBwdParams params_of(const Shape& s, const CuSeqlens& cu, DataType dtype) {
  AttnBwdParams p;
  p.q.dtype = dtype;
  p.batch = s.packed() ? s.lens.size() : s.batch;
  p.heads_q = p.heads_kv = s.heads;
  p.len_q = s.len_q;
  for (int64_t len : s.lens) p.len_k += len;
  p.dim = p.dim_v = s.dim;
  p.q_offset = s.q_offset;
  if (s.packed()) p.cu_seqlens_q = p.cu_seqlens_k = cu.data();
  p.cu_seqlens_int64 = s.int64;
  return p;
}

void report(const char* kernel, const char* type, const Shape& s, int64_t wrong, bool* ok) {
  std::printf("%-8s %s  B %6lld  H %5lld  L %6lld  D %3lld  %s%s  %s\n", kernel, type,
              (long long)(s.packed() ? s.lens.size() : s.batch), (long long)s.heads,
              (long long)s.len_q, (long long)s.dim, s.packed() ? "packed" : "dense",
              s.q_offset ? " block" : "", wrong == 0 ? "ok" : "WRONG");
  if (wrong != 0) *ok = false;
}

// ------------------------------------------------------------------------------- attn_bwd_prepare

// Inputs of a call and its results in double.
template <typename T>
struct PrepareCase {
  std::vector<T> o, dout;
  std::vector<float> lse, lse_lo, dlse, sinks;  // lse: [.., heads, rows]; dlse: [rows, .., heads]
  std::vector<double> row_lse, row_lo, delta, tolerance;  // [padded_heads, padded_rows]
  std::vector<double> dsinks, dsinks_tolerance;           // [blocks, outer, heads]

  PrepareCase(const Shape& s, const AttnBwdParams& p, Random& random) {
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    const int64_t padded = padded_rows(p), heads = padded_heads(p);
    o.assign(s.size(s.layout), from_double<T>(kNan));
    dout.assign(s.size(s.grad_layout), from_double<T>(kNan));
    for (std::vector<float>* x : {&lse, &lse_lo, &dlse}) x->assign(s.rows(), kNan);
    for (int64_t h = 0; h < s.heads; ++h) sinks.push_back(normal(random) - (h == 1 ? 200 : 0));
    row_lse.assign(heads * padded, kInfinity);
    for (auto* x : {&row_lo, &delta, &tolerance}) x->assign(heads * padded, 0);
    for (auto* x : {&dsinks, &dsinks_tolerance})
      x->assign(padded / kRowPad * s.outer() * s.heads, 0);
    const TensorView ov = view_of(s, s.layout, nullptr, Type<T>::kDtype);
    const TensorView gv = view_of(s, s.grad_layout, nullptr, Type<T>::kDtype);
    for (const HostSequence& seq : sequences(s))
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t i = 0; i < seq.len; ++i) {
          const int64_t b = s.packed() ? 0 : seq.b, row = seq.q_begin + i;
          const int64_t at = (b * s.heads + h) * s.len_q + row;
          const int64_t grad_at = (row * s.outer() + b) * s.heads + h;
          const int64_t to = (b * s.heads + h) * padded + seq.padded_begin + i;
          const bool dead = uniform(random) < 0.1;
          lse[at] = dead ? -kInfinity : sinks[h] + 3 * std::abs(normal(random));
          lse_lo[at] = dead ? kNan : 0.5 * normal(random);
          dlse[grad_at] = dead ? kNan : normal(random);
          double dot = 0, size = 0;
          for (int64_t d = 0; d < s.dim; ++d) {
            T& x = o[s.layout.first + offset(ov, b, h, row) + d];
            T& y = dout[s.grad_layout.first + offset(gv, b, h, row) + d];
            x = from_double<T>(dead ? 0 : 0.5 + normal(random));
            y = from_double<T>(dead ? kNan : 0.5 + normal(random));
            dot += to_double(x) * to_double(y);
            size += std::abs(to_double(x) * to_double(y));
          }
          if (dead) continue;
          const double lo = s.terms ? lse_lo[at] : 0, dl = s.terms ? dlse[grad_at] : 0;
          row_lse[to] = lse[at];
          row_lo[to] = lo;
          delta[to] = dot - dl;
          tolerance[to] = 1e-6 * (size + std::abs(dl));
          const double weight = std::exp(double(sinks[h]) - lse[at] - lo);
          const int64_t entry = ((seq.padded_begin + i) / kRowPad * s.outer() + b) * s.heads + h;
          dsinks[entry] -= weight * delta[to];
          dsinks_tolerance[entry] += 4e-6 * weight * (size + std::abs(dl));
        }
  }
};

template <typename T>
void check_prepare(const Shape& s, Random& random, bool* ok) {
  const CuSeqlens cu(s);
  AttnBwdParams p = params_of(s, cu, Type<T>::kDtype);
  const PrepareCase<T> c(s, p, random);
  const Array<T> o(c.o), dout(c.dout);
  const Array<float> lse(c.lse), lse_lo(c.lse_lo), dlse(c.dlse), sinks(c.sinks);
  const int64_t n = c.delta.size(), blocks = padded_rows(p) / kRowPad;
  const int64_t acc_size = padded_heads(p) * padded_rows(p) * dq_acc_pieces(s.dim) * 8;
  const int64_t turns_size = padded_heads(p) * padded_rows(p) / kTurnRows;
  const std::vector<float> poison(std::max<size_t>(n, c.dsinks.size()), 12345.f);
  const std::vector<float> poisoned_acc(s.terms ? acc_size : 0, 12345.f);
  const std::vector<int32_t> poisoned_turns(turns_size, 12345);
  p.out = view_of(s, s.layout, o.data, Type<T>::kDtype);
  p.grad_out = view_of(s, s.grad_layout, dout.data, Type<T>::kDtype);
  const int64_t batch_stride = s.packed() ? 0 : s.heads * s.len_q;
  p.lse = {lse.data, DataType::kFloat32, batch_stride, s.len_q, 1, 0};
  if (s.terms) {
    p.lse_lo = p.lse;
    p.lse_lo.data = lse_lo.data;
    p.grad_lse = {dlse.data, DataType::kFloat32,  s.packed() ? 0 : s.heads,
                  1,         s.outer() * s.heads, 0};
    p.sinks = {sinks.data, DataType::kFloat32, 0, 1, 0, 0};
  }
  int64_t wrong = 0;
  std::vector<std::vector<float>> runs[2];
  for (auto& run : runs) {
    const Array<float> row_lse(poison), row_lo(poison), row_delta(poison), dsinks(poison);
    p.row_lse = row_lse.data, p.row_delta = row_delta.data;
    p.row_lse_lo = s.terms ? row_lo.data : nullptr;
    if (s.terms)
      p.dsinks = {dsinks.data, DataType::kFloat32,  s.packed() ? 0 : s.heads,
                  1,           s.outer() * s.heads, 0};
    const Array<float> dq_acc(poisoned_acc);
    const Array<int32_t> dq_turns(poisoned_turns);
    p.dq_acc = s.terms ? dq_acc.data : nullptr;
    p.dq_turns = s.terms ? dq_turns.data : nullptr;
    launch_attn_bwd_prepare(p, nullptr);
    check_cuda(cudaGetLastError(), "launch");
    check_cuda(cudaDeviceSynchronize(), "attn_bwd_prepare");
    if (s.terms) {
      for (float x : dq_acc.host(acc_size)) wrong += x != 0;
      for (int32_t x : dq_turns.host(turns_size)) wrong += x != 0;
    }
    run = {row_lse.host(n), row_delta.host(n), row_lo.host(n), dsinks.host(c.dsinks.size())};
  }
  for (int i = 0; i < 4; ++i) wrong += differ(runs[0][i], runs[1][i]);
  for (int64_t i = 0; i < n; ++i) {
    wrong += !agrees(runs[0][0][i], c.row_lse[i], 0);
    wrong += !agrees(runs[0][1][i], c.delta[i], c.tolerance[i]);
    wrong += s.terms && !agrees(runs[0][2][i], c.row_lo[i], 0);
  }
  for (int64_t i = 0; s.terms && i < blocks * s.outer() * s.heads; ++i)
    wrong += !agrees(runs[0][3][i], c.dsinks[i], c.dsinks_tolerance[i]);
  report("prepare", Type<T>::kName, s, wrong, ok);
}

// -------------------------------------------------------------------------------- attn_bwd_finish

template <typename T>
void check_finish(const Shape& s, Random& random, bool* ok) {
  std::normal_distribution<float> normal;
  const CuSeqlens cu(s);
  AttnBwdParams p = params_of(s, cu, Type<T>::kDtype);
  p.scale = 0.3;
  const int64_t padded = padded_rows(p), pieces = dq_acc_pieces(s.dim);
  std::vector<float> acc(padded_heads(p) * padded * pieces * 8, kNan);
  std::vector<T> dq(s.size(s.layout), from_double<T>(12345)), right = dq;
  const Array<T> dq_gmem(dq);
  p.dq = view_of(s, s.layout, dq_gmem.data, Type<T>::kDtype);
  for (const HostSequence& seq : sequences(s))
    for (int64_t h = 0; h < s.heads; ++h)
      for (int64_t i = 0; i < seq.len; ++i)
        for (int64_t d = 0; d < s.dim; ++d) {
          const int64_t b = s.packed() ? 0 : seq.b, row = seq.padded_begin + i;
          const int64_t piece = ((b * s.heads + h) * padded / 16 + row / 16) * pieces + d / 8;
          float& x = acc[(piece * 32 + 4 * (row % 8) + d % 8 / 2) * 4 + row / 8 % 2 * 2 + d % 2];
          x = normal(random);
          right[s.layout.first + offset(p.dq, b, h, seq.q_begin + i) + d] =
              from_double<T>(static_cast<float>(p.scale) * x);
        }
  const Array<float> acc_gmem(acc);
  p.dq_acc = acc_gmem.data;
  launch_attn_bwd_finish(p, nullptr);
  check_cuda(cudaGetLastError(), "launch");
  check_cuda(cudaDeviceSynchronize(), "attn_bwd_finish");
  report("finish", Type<T>::kName, s, differ(dq_gmem.host(dq.size()), right), ok);
}

std::vector<int64_t> random_lens(int count, int64_t longest, double empty, Random& random) {
  std::uniform_real_distribution<double> uniform;
  std::vector<int64_t> lens;
  for (int i = 0; i < count; ++i)
    lens.push_back(uniform(random) < empty ? 0 : 1 + int64_t(uniform(random) * longest));
  return lens;
}

int64_t total(const std::vector<int64_t>& lens) {
  int64_t sum = 0;
  for (int64_t len : lens) sum += len;
  return sum;
}

template <typename T>
void check_rows(Random& random, bool* ok) {
  const Layout inside{true}, odd{false, 1, 1}, wide{true, 16, 8}, late{false, 0, 3};
  std::vector<Shape> shapes = {
      {2, 3, 65, 128},
      {1, 2, 200, 64, {}, 0, false, inside},
      {1, 1, 1, 1},
      {3, 2, 64, 8, {}, 0, false, {}, inside},
      {2, 2, 63, 16, {}, 0, false, wide, {}, false},
      {1, 3, 100, 32, {}, 0, false, wide, wide},
      {1, 2, 129, 33, {}, 0, false, {}, inside},
      {2, 1, 130, 80, {}, 0, false, odd, {}},
      {2, 1, 130, 96, {}, 0, false, {}, late},
      {1, 2, 90, 100},
      {1, 2, 67, 256},
      {1, 2, 67, 257, {}, 0, false, inside, odd, false},
      {1, 2, 67, 512},
      {1, 1, 70, 511},
      {1, 1, 70, 7, {}, 0, false, odd, late},
      {70000, 1, 2, 8, {}, 0, false, {}, {}, false},
      {3, 30000, 1, 4},
      {0, 2, 5, 8},
      {2, 2, 0, 8},
      {1, 2, 0, 64, {0, 0, 0}, 0, true},
      {1, 2, 100, 24, {100}, 0, true, inside, {}},
      {1, 2, 99, 24, {0, 0, 64, 0, 1, 34, 0}, 0, false, inside, odd},
  };
  for (const bool block : {false, true})
    for (const double empty : {0.0, 0.6}) {
      // Tokens after the last sequence belong to none.
      const auto lens = random_lens(60, 150, empty, random);
      const int64_t tokens = total(lens) + 37, first = block ? tokens / 3 : 0;
      shapes.push_back({1, 2, block ? tokens / 2 : tokens, 40, lens, first, empty == 0, inside});
    }
  for (const Shape& s : shapes) check_prepare<T>(s, random, ok), check_finish<T>(s, random, ok);
}

// --------------------------------------------------------------------------------- find_sequence

__global__ void find_all(const __grid_constant__ AttentionParams p, int size, SequenceTile* query,
                         SequenceTile* key, int* wrong) {
  const SequenceTile q = find_query_tile(p, blockIdx.x, size);
  const SequenceTile k = find_key_tile(p, blockIdx.x, size);
  if (threadIdx.x == 37) query[blockIdx.x] = q, key[blockIdx.x] = k;
  // By a thread alone, from the sequence itself, others near and far, the first and the last one.
  const int64_t far = threadIdx.x % 8 == 0 ? 0 : threadIdx.x % 8 == 1 ? p.batch : threadIdx.x - 32;
  const int64_t near =
      min(max(q.seq.batch + far * (threadIdx.x % 8 == 2 ? 100 : 1), int64_t{0}), p.batch - 1);
  const SequenceTile same = find_query_tile_near(p, blockIdx.x, size, near);
  if (same.seq.batch != q.seq.batch || same.tile != q.tile || same.empty != q.empty) {
    atomicAdd(wrong, 1);
  }
}

void check_find(int batch, int64_t longest, double empty, int size, bool block, Random& random,
                bool* ok) {
  Shape s{1, 1, 0, 0, random_lens(batch, longest, empty, random), 0, size == 128};
  const int64_t tokens = total(s.lens);
  s.q_offset = block ? tokens / 3 : 0;
  s.len_q = block ? tokens / 4 : tokens;
  const CuSeqlens cu(s);
  const AttentionParams p = params_of(s, cu, DataType::kFloat32);
  const int64_t tiles = (tokens + size - 1) / size + batch;
  std::vector<const HostSequence*> query(tiles), key(tiles);
  std::vector<int64_t> query_tile(tiles), key_tile(tiles);
  const auto found = sequences(s);
  for (const HostSequence& seq : found) {
    for (int64_t i = 0; i * size < seq.len; ++i) {
      const int64_t t = seq.q_begin / size + seq.b + i;
      query.at(t) = &seq, query_tile[t] = i;
    }
    for (int64_t i = 0; i * size < seq.len_k; ++i) {
      const int64_t t = seq.k_begin / size + seq.b + i;
      key.at(t) = &seq, key_tile[t] = i;
    }
  }
  const Array<SequenceTile> query_gmem(tiles), key_gmem(tiles);
  const Array<int> wrong_gmem(1);
  check_cuda(cudaMemset(wrong_gmem.data, 0, sizeof(int)), "cudaMemset");
  find_all<<<static_cast<unsigned>(tiles), 64>>>(p, size, query_gmem.data, key_gmem.data,
                                                 wrong_gmem.data);
  check_cuda(cudaDeviceSynchronize(), "find_sequence");
  const auto q = query_gmem.host(tiles), k = key_gmem.host(tiles);
  int64_t wrong = wrong_gmem.host(1)[0];
  for (int64_t t = 0; t < tiles; ++t) {
    wrong += q[t].empty != (query[t] == nullptr) || k[t].empty != (key[t] == nullptr);
    wrong += query[t] && (q[t].tile != query_tile[t] || q[t].seq.batch != query[t]->b ||
                          q[t].seq.q_begin != query[t]->q_begin || q[t].seq.len_q != query[t]->len);
    wrong += key[t] && (k[t].tile != key_tile[t] || k[t].seq.batch != key[t]->b ||
                        k[t].seq.k_begin != key[t]->k_begin || k[t].seq.len_k != key[t]->len_k);
  }
  std::printf("find     B %6d  tiles of %3d%s  %s\n", batch, size, block ? "  block" : "",
              wrong == 0 ? "ok" : "WRONG");
  if (wrong != 0) *ok = false;
}

void check_finds(Random& random, bool* ok) {
  for (const int batch : {1, 2, 31, 32, 33, 64, 65, 1000, 1024, 1025, 32768, 32769, 100000})
    for (const double empty : {0.0, 0.5, 0.97})
      for (const bool block : {false, true})
        for (const int size : {64, 128, 80})
          check_find(batch, batch > 2000 ? 70 : 500, empty, size, block, random, ok);
}

// ------------------------------------------------------------------------------------------ times

template <typename T>
void time_rows(int64_t length, int64_t dim, Layout layout) {
  const Shape s{2, 16, length, dim, {}, 0, false, layout, layout};
  const CuSeqlens cu(s);
  const DataType dtype = Type<T>::kDtype;
  const double element = sizeof(T) * double(s.rows()) * dim;
  const double prepare_bytes = 2 * element + (12.0 + 32.0 * dq_acc_pieces(dim)) * s.rows();
  const double finish_bytes = element + 4.0 * s.rows() * dim;
  const int sets = rotating_sets(prepare_bytes);
  std::vector<AttnBwdParams> params(sets, params_of(s, cu, dtype));
  Arena arena;
  for (AttnBwdParams& p : params) {
    p.out = view_of(s, layout, arena.take(element), dtype);
    p.grad_out = view_of(s, layout, arena.take(element), dtype);
    p.dq = view_of(s, layout, arena.take(element), dtype);
    p.dq_acc = arena.take<float>(s.rows() * dq_acc_pieces(dim) * 32);
    p.lse = {arena.take(s.rows() * 4), DataType::kFloat32, s.heads * length, length, 1, 0};
    p.row_lse = arena.take<float>(padded_heads(p) * padded_rows(p) * 4);
    p.row_delta = arena.take<float>(padded_heads(p) * padded_rows(p) * 4);
  }
  const std::string what = std::string(Type<T>::kName) + "  B 2  H 16  S " +
                           std::to_string(length) + "  D " + std::to_string(dim) +
                           (layout.heads_inside ? "  (B, S, H, D)" : "");
  const auto at = [&](int i) -> const AttnBwdParams& { return params[i % sets]; };
  print_time("attn_bwd_prepare  " + what,
             median_seconds([&](int i) { launch_attn_bwd_prepare(at(i), nullptr); }),
             prepare_bytes);
  print_time("attn_bwd_finish   " + what,
             median_seconds([&](int i) { launch_attn_bwd_finish(at(i), nullptr); }), finish_bytes);
}

// ------------------------------------------------------------------------------------- tile_order

// On the host: divisions at and around multiples, for small, large and random divisors.
void check_divisor(Random& random, bool* ok) {
  std::vector<uint32_t> divisors;
  for (uint32_t i = 1; i < 300; ++i) divisors.push_back(i), divisors.push_back(0x80000000u - i);
  for (int i = 0; i < 3000; ++i) divisors.push_back(uint32_t(random()) >> random() % 31 | 1);
  int64_t wrong = 0;
  for (const uint32_t value : divisors) {
    const flashbpt::Divisor divisor(value);
    for (int i = 0; i < 300; ++i) {
      const int64_t multiple = int64_t(random() % (0x80000000u / value + 1)) * value;
      const int64_t n = std::clamp<int64_t>(multiple + i % 3 - 1, 0, 0x7fffffff);
      wrong += divisor.quotient(n) != n / value || divisor.remainder(n) != n % value;
    }
  }
  std::printf("divisor  %s\n", wrong == 0 ? "ok" : "WRONG");
  if (wrong != 0) *ok = false;
}

// Every tile of every head once, in a section no tile after a shorter one, and the late ones last.
void check_order(Random& random, bool* ok) {
  int64_t wrong = 0;
  for (int i = 0; i < 300; ++i) {
    const int64_t tiles = 1 + random() % 40, heads = 1 + random() % 70, group = 1 + random() % 5;
    const bool last_first = random() % 2;
    const int64_t late = random() % 2 * (random() % tiles);
    const TileOrder order =
        TileOrder::make(tiles, heads, group, 1 + random() % 100, random() % 2000, last_first, late);
    wrong += order.count() != tiles * heads;
    std::vector<int> seen(tiles * heads, 0);
    uint32_t before = 0, section = 0;
    for (int64_t index = 0; index < tiles * heads; ++index) {
      const TileOrder::Place at = order.at(index);
      if (at.tile >= tiles || at.head >= heads) {
        ++wrong;
        continue;
      }
      ++seen[at.head * tiles + at.tile];
      const uint32_t rank = last_first ? tiles - 1 - at.tile : at.tile;
      const bool is_late = index >= (tiles - late) * heads;
      const uint32_t here = is_late ? heads : at.head / order.section.value();
      wrong += is_late != (rank >= tiles - late);
      wrong += here < section || (here == section && rank < before);
      before = rank, section = here;
    }
    for (int count : seen) wrong += count != 1;
  }
  std::printf("order    %s\n", wrong == 0 ? "ok" : "WRONG");
  if (wrong != 0) *ok = false;
}

}  // namespace

int main() {
  cudaDeviceProp device;
  check_cuda(cudaGetDeviceProperties(&device, 0), "no GPU");
  Random random(std::random_device{}());
  bool ok = true;
  check_divisor(random, &ok);
  check_order(random, &ok);
  check_finds(random, &ok);
  check_rows<__nv_bfloat16>(random, &ok);
  check_rows<__half>(random, &ok);
  check_rows<float>(random, &ok);
  std::printf("%s\n%s\n", ok ? "all checks held" : "CHECKS FAILED", device.name);
  for (const int64_t length : {int64_t{1024}, int64_t{8192}})
    for (const Layout layout : {Layout{}, Layout{true}})
      time_rows<__nv_bfloat16>(length, 128, layout);
  time_rows<__nv_bfloat16>(8192, 64, {});
  time_rows<__nv_bfloat16>(8192, 256, {});
  time_rows<__nv_bfloat16>(8192, 127, {});
  time_rows<float>(8192, 128, {});
  return ok ? 0 : 1;
}
