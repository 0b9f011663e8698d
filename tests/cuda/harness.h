// What the test programs of single kernels share: device arrays, element types, timing.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../../csrc/params.h"

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

template <typename T>
struct Type;
template <>
struct Type<__nv_bfloat16> {
  using Acc = float;
  static constexpr flashbpt::DataType kDtype = flashbpt::DataType::kBFloat16;
  static constexpr const char* kName = "bf16";
  static constexpr double kEps = 0x1p-8;
};
template <>
struct Type<__half> {
  using Acc = float;
  static constexpr flashbpt::DataType kDtype = flashbpt::DataType::kFloat16;
  static constexpr const char* kName = "fp16";
  static constexpr double kEps = 0x1p-11;
};
template <>
struct Type<float> {
  using Acc = float;
  static constexpr flashbpt::DataType kDtype = flashbpt::DataType::kFloat32;
  static constexpr const char* kName = "fp32";
  static constexpr double kEps = 0x1p-22;
};
template <>
struct Type<double> {
  using Acc = double;
  static constexpr flashbpt::DataType kDtype = flashbpt::DataType::kFloat64;
  static constexpr const char* kName = "fp64";
  static constexpr double kEps = 0x1p-49;
};

inline double to_double(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
inline double to_double(__half x) {
  return __half2float(x);
}
inline double to_double(double x) {
  return x;
}
template <typename T>
T from_double(double x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16(static_cast<float>(x));
  if constexpr (std::is_same_v<T, __half>) return __float2half(static_cast<float>(x));
  if constexpr (std::is_floating_point_v<T>) return static_cast<T>(x);
}

// NaN and infinities at the same places, and numbers within `tolerance`.
inline bool agrees(double got, double right, double tolerance) {
  if (std::isnan(right)) return std::isnan(got);
  if (std::isinf(right)) return got == right;
  return std::abs(got - right) <= tolerance;  // false for NaN
}

// How many elements differ in some bit.
template <typename T>
int64_t differ(const std::vector<T>& a, const std::vector<T>& b) {
  const auto same = [](const T& x, const T& y) { return std::memcmp(&x, &y, sizeof(T)) == 0; };
  int64_t wrong = a.size() != b.size();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) wrong += !same(a[i], b[i]);
  return wrong;
}

// A device array that owns its memory.
template <typename T>
struct Array {
  T* data = nullptr;
  explicit Array(size_t n) {
    check_cuda(cudaMalloc(&data, std::max<size_t>(1, n) * sizeof(T)), "cudaMalloc");
  }
  explicit Array(const std::vector<T>& host) : Array(host.size()) {
    check_cuda(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
               "cudaMemcpy");
  }
  ~Array() { cudaFree(data); }
  Array(const Array&) = delete;
  std::vector<T> host(size_t n) const {
    std::vector<T> copy(n);
    check_cuda(cudaMemcpy(copy.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return copy;
  }
};

// Device memory that lives until the object does, filled with small positive numbers.
struct Arena {
  std::vector<void*> blocks;
  ~Arena() {
    for (void* block : blocks) cudaFree(block);
  }
  template <typename T = void>
  T* take(size_t bytes) {
    void* data;
    check_cuda(cudaMalloc(&data, std::max<size_t>(1, bytes)), "cudaMalloc");
    check_cuda(cudaMemset(data, 0x3c, bytes), "cudaMemset");
    blocks.push_back(data);
    return static_cast<T*>(data);
  }
};

// Sets of buffers over which a timing rotates, so that none finds its data in the L2 cache.
inline int rotating_sets(double bytes) {
  return std::max(2, static_cast<int>(200e6 / bytes) + 1);
}

// Median seconds of launch(i), i counting launches.
template <typename Launch>
double median_seconds(Launch launch) {
  constexpr int kRepeats = 60, kWarmUp = 10;
  cudaEvent_t start, stop;
  check_cuda(cudaEventCreate(&start), "cudaEventCreate");
  check_cuda(cudaEventCreate(&stop), "cudaEventCreate");
  std::vector<float> times;
  for (int i = 0; i < kRepeats + kWarmUp; ++i) {
    check_cuda(cudaEventRecord(start), "cudaEventRecord");
    launch(i);
    check_cuda(cudaEventRecord(stop), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(stop), "kernel");
    float ms;
    check_cuda(cudaEventElapsedTime(&ms, start, stop), "cudaEventElapsedTime");
    if (i >= kWarmUp) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e-3;
}

// The same for launch(i, stream), i in [0, count), of which count make a CUDA graph: without the
// time that the host takes. Seconds of one.
template <typename Launch>
double median_graph_seconds(int count, Launch launch) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
  launch(0, stream);  // what the first launch sets up
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int i = 0; i < count; ++i) launch(i, stream);
  check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  check_cuda(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  const double seconds = median_seconds([&](int) { cudaGraphLaunch(replay, nullptr); });
  check_cuda(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  return seconds / count;
}

inline void print_time(const std::string& what, double seconds, double bytes) {
  std::printf("%-60s %8.1f us  %7.1f MB  %.3f TB/s\n", what.c_str(), seconds * 1e6, bytes * 1e-6,
              bytes / seconds * 1e-12);
}
