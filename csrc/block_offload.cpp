#include "block_offload.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#ifdef FLASHBPT_WITH_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace flashbpt {

#ifdef FLASHBPT_WITH_CUDA

namespace {

// A stream beside the current one, behind what that one has been given so far.
c10::cuda::CUDAStream stream_behind_current(const c10::cuda::CUDAStream& side) {
  at::cuda::CUDAEvent reached;
  reached.record(c10::cuda::getCurrentCUDAStream(side.device_index()));
  reached.block(side);
  return side;
}

void current_stream_waits_for(const c10::cuda::CUDAStream& side) {
  at::cuda::CUDAEvent done;
  done.record(side);
  done.block(c10::cuda::getCurrentCUDAStream(side.device_index()));
}

// In destructors: memory that copies still use is the current stream's to give away after them.
void settle(const c10::cuda::CUDAStream& side) noexcept {
  try {
    current_stream_waits_for(side);
  } catch (const c10::Error&) {  // the error that made it so is under way
  }
}

}  // namespace

struct HostWriter::Copies {
  c10::cuda::CUDAStream stream;
};

HostWriter::HostWriter(c10::Device device)
    : copies_(new Copies{c10::cuda::getStreamFromPool(false, device.index())}) {}

HostWriter::~HostWriter() {
  settle(copies_->stream);
}

void HostWriter::write(const at::Tensor& to_host, const at::Tensor& from) {
  const c10::cuda::CUDAStreamGuard guard(stream_behind_current(copies_->stream));
  to_host.copy_(from, /*non_blocking=*/true);
  // Its memory is not given away before the copy has ended.
  c10::cuda::CUDACachingAllocator::recordStream(from.storage().data_ptr(), copies_->stream);
}

struct HostReader::Copies {
  c10::cuda::CUDAStream stream;
  c10::Device device;
  int64_t begin = 0, count = 0;
  at::Tensor rows;  // [begin, begin + count) on their way
};

HostReader::HostReader(const at::Tensor& rows, c10::Device device) : rows_(rows) {
  if (rows.defined() && rows.device() != device)
    copies_.reset(new Copies{c10::cuda::getStreamFromPool(false, device.index()), device});
}

HostReader::~HostReader() {
  if (copies_ && copies_->rows.defined()) settle(copies_->stream);
}

at::Tensor HostReader::get(int64_t begin, int64_t count) {
  if (!copies_) return rows_.defined() ? rows_.narrow(0, begin, count) : rows_;
  if (copies_->begin != begin || copies_->count != count) prefetch(begin, count);
  current_stream_waits_for(copies_->stream);
  copies_->count = 0;
  return std::exchange(copies_->rows, at::Tensor());
}

void HostReader::prefetch(int64_t begin, int64_t count) {
  if (!copies_ || count == 0) return;
  if (copies_->rows.defined()) current_stream_waits_for(copies_->stream);
  const at::Tensor from = rows_.narrow(0, begin, count);
  // Of the current stream's memory: what the block before used may be in it.
  const at::Tensor to = at::empty(from.sizes(), from.options().device(copies_->device));
  const c10::cuda::CUDAStreamGuard guard(stream_behind_current(copies_->stream));
  to.copy_(from, /*non_blocking=*/true);
  copies_->begin = begin, copies_->count = count, copies_->rows = to;
}

#else

// On the host nothing has to move.
struct HostWriter::Copies {};
struct HostReader::Copies {};

HostWriter::HostWriter(c10::Device) {}
HostWriter::~HostWriter() = default;
void HostWriter::write(const at::Tensor& to_host, const at::Tensor& from) {
  to_host.copy_(from);
}

HostReader::HostReader(const at::Tensor& rows, c10::Device) : rows_(rows) {}
HostReader::~HostReader() = default;
at::Tensor HostReader::get(int64_t begin, int64_t count) {
  return rows_.defined() ? rows_.narrow(0, begin, count) : rows_;
}
void HostReader::prefetch(int64_t, int64_t) {}

#endif

at::Tensor HostWriter::empty(at::IntArrayRef sizes, at::ScalarType dtype) const {
  return at::empty(sizes, at::TensorOptions(at::kCPU).dtype(dtype).pinned_memory(true));
}

}  // namespace flashbpt
