// The backends of an op, in the order in which a call tries them.
#pragma once

#include <string>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

namespace flashbpt {

// The numbers that `use_backend` passes through the ops.
enum class Backend : int64_t { kAuto = 0, kCpu = 1, kSm80 = 2, kSm90 = 3, kAten = 4 };

struct BackendName {
  Backend backend;
  const char* name;
};
constexpr BackendName kBackends[] = {{Backend::kSm90, "sm90"},
                                     {Backend::kSm80, "sm80"},
                                     {Backend::kAten, "aten"},
                                     {Backend::kCpu, "cpu"}};

// refusal(backend): why it does not serve a call; null where it does. The first that serves it.
template <typename Refusal>
Backend choose_backend(c10::Device device, Refusal refusal) {
  for (const auto& [backend, name] : kBackends) {
    if (!refusal(backend)) return backend;
  }
  std::string reasons;
  for (const auto& [backend, name] : kBackends) {
    reasons += std::string(reasons.empty() ? "" : "; ") + name + ": " + refusal(backend);
  }
  TORCH_CHECK(false, "flashbpt: no kernel serves this call on ", device, " (", reasons, ")");
}

// The first that serves it with its kernel(backend), then a line for each that does not.
template <typename Refusal, typename Kernel>
std::string describe_backends(Refusal refusal, Kernel kernel) {
  std::string first = "none", reasons;
  for (const auto& [backend, name] : kBackends) {
    if (const char* reason = refusal(backend)) {
      reasons += std::string("\n") + name + ": " + reason;
    } else if (first == "none") {
      const std::string config = kernel(backend);
      first = config.empty() ? name : name + (" " + config);
    }
  }
  return first + reasons;
}

}  // namespace flashbpt
