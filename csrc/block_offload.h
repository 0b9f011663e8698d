// What waits for the backward in pinned host memory: rows go there beside the forward's kernels and
// come back beside the backward's, one block ahead.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace flashbpt {

// Copies rows to host memory. The current stream waits for the copies when this is destroyed.
class HostWriter {
 public:
  explicit HostWriter(c10::Device device);
  ~HostWriter();

  // Pinned, on the host.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) const;
  void write(const at::Tensor& to_host, const at::Tensor& from);

 private:
  struct Copies;
  std::unique_ptr<Copies> copies_;
};

// Rows [tokens, width], on the device or waiting on the host.
class HostReader {
 public:
  HostReader(const at::Tensor& rows, c10::Device device);
  ~HostReader();

  // Rows [begin, begin + count) on the device.
  at::Tensor get(int64_t begin, int64_t count);
  // Starts the copy of rows that are got next; count 0: there are none.
  void prefetch(int64_t begin, int64_t count);

 private:
  struct Copies;
  at::Tensor rows_;
  std::unique_ptr<Copies> copies_;  // none: rows_ is on the device
};

}  // namespace flashbpt
