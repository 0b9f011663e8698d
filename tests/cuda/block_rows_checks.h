// Checks of row_norm and rope against loops in fp64, and what all checks of these kernels share.
#pragma once

#include <random>

#include "../../csrc/sm80/add_partials/launch.h"
#include "../../csrc/sm80/rope/launch.h"
#include "../../csrc/sm80/row_norm/launch.h"
#include "harness.h"

using namespace flashbpt::sm80;
using flashbpt::Activation;

inline int multiprocessors() {
  cudaDeviceProp device;
  check_cuda(cudaGetDeviceProperties(&device, 0), "no GPU");
  return device.multiProcessorCount;
}

inline std::mt19937_64 random_bits(std::random_device{}());
inline std::normal_distribution<double> normal;
inline bool all_held = true;

// A result in fp64, and the size of the terms it is the sum of.
struct Value {
  double value, size;
};

// The kernels' order and functions may cost 2^-20 of the terms, and their result is rounded.
template <typename T>
void compare(const std::string& what, const std::vector<T>& got, const std::vector<Value>& right) {
  const double smallest = std::is_same_v<T, __half> ? 0x1p-24 : 1e-40;
  double worst = -1, error = 0, bound = 0;
  int64_t wrong = got.size() != right.size();
  for (size_t i = 0; i < right.size(); ++i) {
    const double allowed =
        Type<T>::kEps * std::abs(right[i].value) + 0x1p-20 * right[i].size + smallest;
    const double off = std::abs(to_double(got[i]) - right[i].value);
    wrong += !(off <= allowed);
    if (off / allowed > worst) worst = off / allowed, error = off, bound = allowed;
  }
  std::printf("%s  %-62s error %.2e  bound %.2e  %s\n", Type<T>::kName, what.c_str(), error, bound,
              wrong == 0 ? "ok" : "WRONG");
  all_held = all_held && wrong == 0;
}

// A tensor on both sides, `first` elements into its memory.
template <typename T>
struct Tensor {
  int64_t size, first;
  std::vector<T> host;
  Array<T> memory;

  Tensor(int64_t size, std::vector<T> host, int64_t first)
      : size(size), first(first), host(std::move(host)), memory(first + size) {
    upload();
  }
  static Tensor random(int64_t size, double mean = 0.5, int64_t first = 0) {
    std::vector<T> host(size);
    for (T& x : host) x = from_double<T>(mean + normal(random_bits));
    return Tensor(size, std::move(host), first);
  }
  void upload() {
    check_cuda(cudaMemcpy(data(), host.data(), size * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  T* data() const { return memory.data + first; }
  double at(int64_t i) const { return to_double(host[i]); }
  std::vector<T> result() const {
    std::vector<T> all = memory.host(first + size);
    return {all.begin() + first, all.end()};
  }
};

inline void finish(const char* what) {
  check_cuda(cudaGetLastError(), what);
  check_cuda(cudaDeviceSynchronize(), what);
}

struct NormCase {
  int64_t rows;
  int width;
  bool centred, weight, bias, residual;
  int64_t first = 0;
};

template <typename T>
void check_norm(const NormCase& c) {
  const int64_t size = c.rows * c.width;
  auto x = Tensor<T>::random(size, 2.0, c.first), dy = Tensor<T>::random(size, 0.3, c.first);
  auto out = Tensor<T>::random(size, 0, c.first), residual = Tensor<T>::random(size, 1, c.first);
  auto w = Tensor<T>::random(c.width, 1), b = Tensor<T>::random(c.width);
  auto dw = Tensor<float>::random(c.width, 3), db = Tensor<float>::random(c.width, 3);
  RowNormBackwardParams p;
  p.x = x.data(), p.out = out.data(), p.rows = c.rows, p.width = c.width;
  p.weight = c.weight ? w.data() : nullptr, p.bias = c.bias ? b.data() : nullptr;
  p.eps = 1e-5f, p.centred = c.centred, p.dtype = Type<T>::kDtype;
  launch_row_norm(p, nullptr);
  finish("row_norm");
  std::vector<Value> y(size), dx(size), dweight(c.width), dbias(c.width);
  for (int j = 0; j < c.width; ++j) dweight[j] = {dw.at(j), 3}, dbias[j] = {db.at(j), 3};
  for (int64_t r = 0; r < c.rows; ++r) {
    const int64_t row = r * c.width;
    const auto g = [&](int j) { return dy.at(row + j) * (c.weight ? w.at(j) : 1); };
    double mean = 0, square = 0, along_x = 0, along_one = 0, terms = 0;
    for (int j = 0; j < c.width && c.centred; ++j) mean += x.at(row + j) / c.width;
    for (int j = 0; j < c.width; ++j) square += std::pow(x.at(row + j) - mean, 2) / c.width;
    const double rstd = 1 / std::sqrt(square + p.eps);
    const auto x_hat = [&](int j) { return (x.at(row + j) - mean) * rstd; };
    for (int j = 0; j < c.width; ++j) {
      along_x += g(j) * x_hat(j) / c.width, along_one += g(j) * c.centred / c.width;
      terms += std::abs(g(j)) * (1 + std::abs(x_hat(j))) / c.width;
    }
    for (int j = 0; j < c.width; ++j) {
      const double scaled = x_hat(j) * (c.weight ? w.at(j) : 1), bias = c.bias ? b.at(j) : 0;
      y[row + j] = {scaled + bias, (std::abs(x.at(row + j)) + std::abs(mean)) * rstd + 1};
      y[row + j].size *= 1 + (c.weight ? std::abs(w.at(j)) : 0) + std::abs(bias);
      const double add = c.residual ? residual.at(row + j) : 0;
      dx[row + j] = {add + rstd * (g(j) - along_one - x_hat(j) * along_x),
                     std::abs(add) + rstd * (std::abs(g(j)) + terms * (2 + std::abs(x_hat(j))))};
      const double sized = (std::abs(x.at(row + j)) + std::abs(mean)) * rstd;
      dweight[j].value += dy.at(row + j) * x_hat(j);
      dweight[j].size += std::abs(dy.at(row + j)) * sized;
      dbias[j].value += dy.at(row + j), dbias[j].size += std::abs(dy.at(row + j));
    }
  }
  const std::string what = std::string(c.centred ? "LayerNorm " : "RMSNorm ") +
                           std::to_string(c.rows) + " x " + std::to_string(c.width) +
                           (c.first ? " unaligned" : "") + (c.weight ? "" : " no weight");
  compare(what, out.result(), y);
  p.dy = dy.data(), p.residual = c.residual ? residual.data() : nullptr;
  p.out = c.residual ? residual.data() : out.data();
  p.blocks = row_norm_blocks(p, multiprocessors());
  Array<float> partials(2 * p.blocks * c.width + 4);
  const int64_t second = (int64_t{p.blocks} * c.width + 3) / 4 * 4;
  p.weight_partials = partials.data, p.bias_partials = partials.data + second;
  const auto run = [&] {
    dw.upload(), db.upload();
    launch_row_norm_backward(p, nullptr);
    launch_add_partials(
        {{p.weight_partials, p.bias_partials}, {dw.data(), db.data()}, p.blocks, c.width}, nullptr);
    finish("row_norm_backward");
  };
  run();
  compare(what + ": dx", c.residual ? residual.result() : out.result(), dx);
  compare(what + ": dweight", dw.result(), dweight);
  compare(what + ": dbias", db.result(), dbias);
  const auto first_dw = dw.result(), first_db = db.result();
  run();
  const int64_t other = differ(first_dw, dw.result()) + differ(first_db, db.result());
  all_held = all_held && other == 0;
  if (other) std::printf("%lld weight gradients DIFFER in a second run\n", (long long)other);
}

struct RopeCase {
  int64_t rows;
  int heads, dim, pairs;
  bool interleaved, norm, in_place, wide;  // wide: dy is fp32, of other strides
  int64_t first = 0;
};

template <typename T>
void check_rope(const RopeCase& c) {
  const int64_t size = c.rows * c.heads * c.dim, gap = 16;
  auto x = Tensor<T>::random(size, 0.5, c.first), out = Tensor<T>::random(size, 0, c.first);
  auto dy = Tensor<T>::random(size, 0.5, c.first);
  auto wide = Tensor<float>::random(c.heads * c.rows * (c.dim + gap));  // [heads, rows, dim + gap]
  auto w = Tensor<T>::random(c.dim, 1);
  auto dw = Tensor<float>::random(c.dim, 3);
  auto cos = Tensor<float>::random(c.rows * c.pairs), sin = Tensor<float>::random(c.rows * c.pairs);
  const auto view = [&](const Tensor<T>& t) {
    return flashbpt::TensorView{t.data(), Type<T>::kDtype, 0, c.dim, c.heads * c.dim, 1};
  };
  const auto dy_at = [&](int64_t r, int h, int j) {
    return c.wide ? wide.at((h * c.rows + r) * (c.dim + gap) + j)
                  : dy.at((r * c.heads + h) * c.dim + j);
  };
  RopeBackwardParams p;
  p.weight = c.norm ? w.data() : nullptr, p.eps = 1e-5f;
  p.cos = c.pairs ? cos.data() : nullptr, p.sin = sin.data(), p.pairs = c.pairs;
  p.interleaved = c.interleaved, p.rows = c.rows, p.heads = c.heads, p.dim = c.dim;
  std::vector<Value> y(size), dx(size), dweight(c.dim);
  for (int j = 0; j < c.dim; ++j) dweight[j] = {dw.at(j), 3};
  std::vector<double> n(c.dim), d(c.dim);
  for (int64_t r = 0; r < c.rows; ++r)
    for (int h = 0; h < c.heads; ++h) {
      const int64_t at = (r * c.heads + h) * c.dim;
      double square = 0, along = 0, terms = 0, most = 0;
      for (int j = 0; j < c.dim; ++j) square += x.at(at + j) * x.at(at + j) / c.dim;
      const double rstd = c.norm ? 1 / std::sqrt(square + p.eps) : 1;
      const auto weight = [&](int j) { return c.norm ? w.at(j) : 1; };
      for (int j = 0; j < c.dim; ++j) n[j] = x.at(at + j) * rstd * weight(j), d[j] = dy_at(r, h, j);
      for (int i = 0; i < c.pairs; ++i) {
        const int a = c.interleaved ? 2 * i : i, b = c.interleaved ? 2 * i + 1 : i + c.pairs;
        const double co = cos.at(r * c.pairs + i), si = sin.at(r * c.pairs + i);
        const double na = n[a], nb = n[b], da = d[a], db = d[b];
        n[a] = na * co - nb * si, n[b] = nb * co + na * si;
        d[a] = da * co + db * si, d[b] = db * co - da * si;
        most = std::max({most, std::abs(co), std::abs(si)});
      }
      most = (1 + most) * 16;  // products of a few normal numbers
      for (int j = 0; j < c.dim; ++j) {
        along += d[j] * weight(j) * x.at(at + j) * rstd / c.dim;
        terms += std::abs(d[j] * weight(j) * x.at(at + j) * rstd) / c.dim;
      }
      for (int j = 0; j < c.dim; ++j) {
        const double x_hat = x.at(at + j) * rstd, g = d[j] * weight(j);
        y[at + j] = {n[j], most};
        dx[at + j] = {c.norm ? rstd * (g - x_hat * along) : d[j],
                      most * (1 + rstd) * (1 + std::abs(x_hat) * terms)};
        dweight[j].value += d[j] * x_hat;
        dweight[j].size += std::abs(d[j] * x_hat) + std::abs(x_hat);
      }
    }
  char name[128];
  std::snprintf(name, sizeof(name), "rope %d x %d x %d, %d pairs%s%s%s%s", int(c.rows), c.heads,
                c.dim, c.pairs, c.interleaved ? " interleaved" : "", c.norm ? " norm" : "",
                c.first ? " unaligned" : "", c.wide ? " dy fp32" : "");
  // In place: the input's memory is the output's.
  auto copy = Tensor<T>(size, x.host, c.first);
  p.in = view(copy), p.out = c.in_place ? view(copy) : view(out);
  launch_rope(p, nullptr);
  finish("rope");
  compare(name, c.in_place ? copy.result() : out.result(), y);
  p.x = view(x), p.in = view(dy), p.out = c.in_place && !c.wide ? view(dy) : view(out);
  if (c.wide)
    p.in = {wide.data(), flashbpt::DataType::kFloat32, 0, c.rows * (c.dim + gap), c.dim + gap, 1};
  p.blocks = rope_blocks(p, multiprocessors());
  Array<float> partials(int64_t{p.blocks} * c.dim);
  if (c.norm) p.weight_partials = partials.data;
  launch_rope_backward(p, nullptr);
  if (c.norm) launch_add_partials({{partials.data}, {dw.data()}, p.blocks, c.dim}, nullptr);
  finish("rope_backward");
  compare(std::string(name) + ": dx", c.in_place && !c.wide ? dy.result() : out.result(), dx);
  if (c.norm) compare(std::string(name) + ": dweight", dw.result(), dweight);
}
