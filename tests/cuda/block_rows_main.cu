// Checks and times the kernels between a block's matrix products alone, without torch: row_norm,
// rope, activation, row_dropout, add_partials. docs/block_rows.md has the commands. Exit status 0:
// every check held.
#include "../../csrc/attention/philox.h"
#include "../../csrc/sm80/activation/launch.h"
#include "../../csrc/sm80/add_partials/launch.h"
#include "../../csrc/sm80/rope/launch.h"
#include "../../csrc/sm80/row_dropout/launch.h"
#include "../../csrc/sm80/row_norm/launch.h"
#include "block_rows_checks.h"
#include "block_rows_timings.h"

namespace {

// f(x) and f'(x), and the sizes of their terms.
std::pair<Value, Value> activated(Activation f, double x) {
  const auto logistic = [](double t) { return 1 / (1 + std::exp(-t)); };
  const double phi = 0.5 * std::erfc(-x * std::sqrt(0.5));
  const double density = std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI);
  const double u = 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x), s = logistic(x);
  const double u_slope = 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x), t = logistic(u);
  const double t_slope = x * t * logistic(-u) * u_slope, relative = 1 + std::abs(u);
  switch (f) {
    case Activation::kSilu:
      return {{x * s, std::abs(x * s)},
              {s + x * s * logistic(-x), s + std::abs(x * s * logistic(-x))}};
    case Activation::kGelu:
      return {{x * phi, std::abs(x)}, {phi + x * density, 1 + std::abs(x * x * x * density)}};
    case Activation::kGeluTanh:
      return {{x * t, std::abs(x * t) * relative},
              {t + t_slope, (t + std::abs(t_slope)) * relative}};
    case Activation::kRelu:
      break;
  }
  return {{x > 0 ? x : 0, 0}, {x > 0 ? 1.0 : 0.0, 0}};
}

template <typename T>
void check_activation(Activation f, bool gated, int64_t count, int64_t first) {
  auto gate = Tensor<T>::random(count, 0, first), up = Tensor<T>::random(count, 1, first);
  auto grad = Tensor<T>::random(count, 1, first), out = Tensor<T>::random(count, 0, first);
  Tensor<T>& argument = gated ? gate : up;
  const double special[] = {-87.5, 87.5, -1e4, 1e4, -6e4, 6e4, -20, 20, -3, 0, -0.0, -104, 1e-30};
  for (size_t i = 0; i < std::min<size_t>(std::size(special), count); ++i) {
    up.host[i] = grad.host[i] = from_double<T>(1);
    argument.host[i] = from_double<T>(special[i]);
  }
  gate.upload(), up.upload(), grad.upload();
  std::vector<Value> y(count), dgate(count), dup(count);
  for (int64_t i = 0; i < count; ++i) {
    const auto [value, slope] = activated(f, argument.at(i));
    const double factor = gated ? up.at(i) : 1, g = grad.at(i);
    y[i] = {value.value * factor, value.size * std::abs(factor)};
    dgate[i] = {g * factor * slope.value, slope.size * std::abs(g * factor)};
    dup[i] = gated ? Value{g * value.value, value.size * std::abs(g)} : dgate[i];
  }
  const char* const names[] = {"silu", "gelu", "gelu_tanh", "relu"};
  const std::string what = std::string(names[static_cast<int>(f)]) + (gated ? " gated" : "") +
                           " of " + std::to_string(count) + (first ? " unaligned" : "");
  ActivationParams p{
      gated ? gate.data() : nullptr, up.data(), out.data(), count, f, Type<T>::kDtype};
  launch_activation_forward(p, nullptr);
  finish("activation");
  compare(what, out.result(), y);
  p.out = grad.data();
  launch_activation_backward(p, nullptr);
  finish("activation_backward");
  compare(what + ": the output again", grad.result(), y);
  compare(what + ": dup", up.result(), dup);
  if (gated) compare(what + ": dgate", gate.result(), dgate);
}

template <typename T>
void check_dropout(int64_t rows, int width, double drop, bool bias, int64_t first = 0) {
  const int64_t size = rows * width, site = 5, token = 4294967290, state[] = {-7, 4294967295};
  auto x = Tensor<T>::random(size, 0.5, first), residual = Tensor<T>::random(size, 1, first);
  auto b = Tensor<T>::random(width);
  Tensor<int64_t> rng(2, {state[0], state[1]}, 0);
  const auto threshold = static_cast<uint64_t>(std::ceil(drop * 0x1p32));
  const double scale = drop < 1 ? 1 / (1 - drop) : kInfinity;
  std::vector<Value> y(size), dx(size);
  int64_t dropped = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t r = i / width, c = i % width;
    const auto words = flashbpt::philox4x32_7(
        flashbpt::PhiloxKeys(state[0]), {{static_cast<uint32_t>(state[1] + 4 * site), 0,
                                          static_cast<uint32_t>(token + r), uint32_t(c / 4)}});
    const bool keep = drop == 0 || words.word[c % 4] >= threshold;
    const double kept = keep ? scale : 0, sum = x.at(i) + (bias ? b.at(c) : 0);
    y[i] = {residual.at(i) + (keep ? sum * kept : 0), 4 * (1 + (keep ? kept : 0))};
    dx[i] = {keep ? x.at(i) * kept : 0, 0};
    dropped += !keep;
  }
  char name[128];
  std::snprintf(name, sizeof(name), "dropout %.3g of %d x %d%s, %.3f dropped", drop, int(rows),
                width, first ? " unaligned" : "", double(dropped) / size);
  RowDropoutParams p;
  p.x = x.data(), p.bias = bias ? b.data() : nullptr, p.residual = residual.data();
  p.out = residual.data(), p.rows = rows, p.width = width, p.dtype = Type<T>::kDtype;
  p.rng_state = drop > 0 ? rng.data() : nullptr, p.site = site;
  p.token = static_cast<uint32_t>(token), p.threshold = threshold, p.scale = float(scale);
  launch_row_dropout(p, nullptr);
  finish("row_dropout");
  compare(name, residual.result(), y);
  p.bias = p.residual = nullptr, p.out = x.data();
  launch_row_dropout(p, nullptr);
  finish("row_dropout");
  compare(std::string(name) + ": dx", x.result(), dx);
}

// Offsets past 2^31: rows of one element, which become twice what they were.
void check_long() {
  const int64_t rows = (int64_t{1} << 31) + 1000;
  size_t free, total;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (free < 10e9) return;
  Arena arena;
  auto* const x = arena.take<__nv_bfloat16>(rows * 2);
  auto* const out = arena.take<__nv_bfloat16>(rows * 2);
  const auto check = [&](const char* what, const __nv_bfloat16* data, double factor) {
    finish(what);
    __nv_bfloat16 last[1000];
    check_cuda(cudaMemcpy(last, data + rows - 1000, sizeof(last), cudaMemcpyDeviceToHost), what);
    const std::vector<Value> right(1000, Value{factor * 0.011474609375, 0});  // 0x3c3c
    compare(what, std::vector<__nv_bfloat16>(last, last + 1000), right);
  };
  RowDropoutParams p;
  p.x = p.residual = x, p.out = out, p.rows = rows, p.width = 1,
  p.dtype = Type<__nv_bfloat16>::kDtype;
  launch_row_dropout(p, nullptr);
  check("residual of 2^31 + 1000 rows", out, 2);
  launch_activation_forward({nullptr, out, x, rows, Activation::kRelu, p.dtype}, nullptr);
  check("relu of 2^31 + 1000 elements", x, 2);
}

template <typename T>
void check_type() {
  for (const NormCase& c : {NormCase{37, 4096, false, true, false, true},
                            {37, 4096, true, true, true, false},
                            {2000, 64, true, true, true, true},
                            {999, 1000, false, true, false, false},
                            {5, 8192, true, true, true, true},
                            {3, 12288, false, true, false, true},
                            {3, 20000, true, true, true, true},
                            {300, 63, true, true, true, true},
                            {300, 768, true, false, false, true, 1},
                            {1, 4104, true, true, false, true}})
    check_norm<T>(c);
  for (const RopeCase& c : {RopeCase{70, 32, 128, 64, false, true, true, false},
                            {70, 8, 128, 64, true, true, false, true},
                            {33, 3, 128, 32, false, false, true, false},
                            {33, 3, 96, 32, true, true, true, false},
                            {50, 5, 80, 40, false, true, false, true},
                            {900, 7, 64, 0, false, true, true, false},
                            {9, 2, 512, 256, false, true, true, true},
                            {40, 3, 99, 17, false, true, true, false},
                            {40, 3, 99, 17, true, true, true, true},
                            {40, 3, 128, 64, false, true, true, false, 1},
                            {11, 1, 1024, 512, false, true, true, false},
                            {40, 4, 64, 30, false, false, false, true}})
    check_rope<T>(c);
  for (const auto f :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu})
    for (const bool gated : {true, false}) {
      check_activation<T>(f, gated, 100003, 0);
      check_activation<T>(f, gated, 4099, 1);
    }
  check_dropout<T>(77, 1024, 0.3, true);
  check_dropout<T>(77, 333, 0.1, true);
  check_dropout<T>(20, 64, 0.5, false, 1);
  check_dropout<T>(20, 64, 1.0, true);
  check_dropout<T>(20, 64, 0.0, true);
}

}  // namespace

int main() {
  check_type<__nv_bfloat16>();
  check_type<__half>();
  check_type<float>();
  check_long();
  std::printf("%s\n", all_held ? "all checks held" : "CHECKS FAILED");
  time_all();
  return all_held ? 0 : 1;
}
