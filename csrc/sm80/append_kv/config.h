// The numbers of the kernel that writes new keys and values into a paged cache.
#pragma once

namespace flashbpt::sm80 {

// A thread takes `width` neighbouring elements: a vector of 16 bytes in 16-bit types. A few
// thousand tokens are a few megabytes, so launches and latency bind, not bandwidth.
struct AppendKvConfig {
  int block_threads;
  int width;
};
inline constexpr AppendKvConfig kAppendKvConfig = {256, 8};

}  // namespace flashbpt::sm80
