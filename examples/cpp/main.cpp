// Attention from C++: loads flashbpt's library, calls its forward and backward ops through the
// dispatcher, and holds them against scaled_dot_product_attention and its autograd.
//
//   attention PATH_TO_FLASHBPT_LIBRARY        (CMakeLists.txt says how to build and run it)
#include <dlfcn.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd.h>

namespace {

using Values = torch::jit::Stack;

// Calls flashbpt::`op`. Arguments that are not given take the schema's order, so they are listed.
Values call(const std::string& op, Values arguments) {
  const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow(("flashbpt::" + op).c_str(), "");
  handle.callBoxed(&arguments);
  return arguments;
}

// What forward and backward share, from `mask` to `backend`: causal attention, nothing else.
Values causal_options(int64_t heads) {
  const c10::IValue none;
  return {
      none,   // mask
      none,   // sinks
      none,   // alibi_slopes
      none,   // cu_seqlens_q
      none,   // cu_seqlens_k
      none,   // rng_state
      none,   // max_seqlen_q
      none,   // max_seqlen_k
      none,   // scale: 1 / sqrt(D)
      true,   // causal
      -1,     // window_left: no limit
      -1,     // window_right
      0.0,    // softcap
      0.0,    // dropout_p
      0,      // q_offset
      0,      // k_offset
      0,      // batch_offset
      0,      // head_offset
      heads,  // total_heads
      0,      // diagonal: upper-left
      0,      // backend: auto
  };
}

Values operator+(Values a, const Values& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

bool close(const char* name, const at::Tensor& seen, const at::Tensor& expected) {
  const double error = (seen - expected).abs().max().item<double>();
  const bool fine = seen.sizes() == expected.sizes() && error < 2e-5;
  std::printf("%-4s largest error %.1e  %s\n", name, error, fine ? "ok" : "WRONG");
  return fine;
}

bool compare(int64_t length, int64_t dim) {
  constexpr int64_t kBatch = 2, kHeads = 6, kKvHeads = 2;
  at::Tensor q = at::randn({kBatch, kHeads, length, dim});
  at::Tensor k = at::randn({kBatch, kKvHeads, length, dim});
  at::Tensor v = at::randn({kBatch, kKvHeads, length, dim});
  const at::Tensor grad_out = at::randn({kBatch, kHeads, length, dim});
  std::printf("causal attention, %ld tokens, head dim %ld\n", long(length), long(dim));

  const Values options = causal_options(kHeads);
  const Values forward = call("attention_forward", Values{q, k, v} + options);
  const at::Tensor out = forward[0].toTensor(), lse = forward[1].toTensor();
  const Values saved = {grad_out, c10::IValue(), q, k, v, out, lse, forward[2], forward[3]};
  const c10::List<bool> need({true, true, true, false, false, false});
  const Values grads = call("attention_backward", saved + options + Values{false, need});

  for (at::Tensor* input : {&q, &k, &v}) input->requires_grad_();
  const at::Tensor expected = at::scaled_dot_product_attention(
      q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true, /*scale=*/std::nullopt,
      /*enable_gqa=*/true);
  const auto expected_grads = torch::autograd::grad({expected}, {q, k, v}, {grad_out});

  bool fine = close("out", out, expected.detach());
  fine &= close("dq", grads[0].toTensor(), expected_grads[0]);
  fine &= close("dk", grads[1].toTensor(), expected_grads[1]);
  fine &= close("dv", grads[2].toTensor(), expected_grads[2]);
  return fine;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s PATH_TO_FLASHBPT_LIBRARY\n", argv[0]);
    return 2;
  }
  if (!dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  try {
    const bool fine = compare(128, 64) & compare(333, 40);
    std::puts(fine ? "flashbpt agrees with PyTorch" : "flashbpt and PyTorch differ");
    return fine ? 0 : 1;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
