// The Blockwise Parallel Transformer on the host: a pre-norm transformer block, and its
// feed-forward half alone, one block of query rows at a time. Schemas: ops.cpp. docs/blockwise.md
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "block_elementwise.h"

namespace flashbpt {

// The tensors of a block in the order of the schemas; undefined: there is none.
enum BlockWeight : size_t {
  kNorm1,      // [hidden]
  kNorm1Bias,  // [hidden]
  kWq,         // [heads * dim, hidden]
  kBq,
  kWk,  // [kv_heads * dim, hidden]
  kBk,
  kWv,  // [kv_heads * dim, hidden]
  kBv,
  kQNorm,  // [dim]
  kKNorm,  // [dim]
  kSinks,  // [heads]
  kWo,     // [hidden, heads * dim]
  kBo,
  kNorm2,      // [hidden]
  kNorm2Bias,  // [hidden]
  kWGate,      // [ffn, hidden]; none: the FFN is not gated
  kBGate,
  kWUp,  // [ffn, hidden]
  kBUp,
  kWDown,  // [hidden, ffn]
  kBDown,
  kBlockWeights
};
using BlockTensors = std::array<at::Tensor, kBlockWeights>;
using BlockNeeds = std::array<bool, kBlockWeights + 1>;  // of the gradients: x's, then the weights'

// What is kept from the forward to the backward beside x.
enum class BlockSave : int64_t {
  kX,       // nothing: attention is computed again
  kOutput,  // the output of attention and its LSE
  kAll,     // and what every matrix product made: no product is computed again
};

struct BlockConfig {
  int64_t heads, kv_heads;
  NormKind norm;
  double eps;
  Activation activation;
  bool rotary, interleaved;
  double rope_theta;
  std::optional<double> scale;
  int64_t window_left;  // -1: no limit
  double softcap;
  double attention_dropout, residual_dropout;
  BlockSave save;
  bool offload;  // x and attention's output wait for the backward in pinned memory
  int64_t rows;  // of a block; 0: chosen by the shape
  bool deterministic;
  int64_t backend;
};

struct BlockInputs {
  at::Tensor x;                          // [batch, length, hidden], packed [tokens, hidden]
  std::optional<at::Tensor> cos, sin;    // [positions, pairs] instead of rope_theta's
  std::optional<at::Tensor> cu_seqlens;  // packed: [sequences + 1]
  std::optional<at::Tensor> rng_state;   // int64 [2] where there is dropout
};

// What the forward keeps; empty where `save` does not ask for it.
struct BlockSaved {
  at::Tensor out;       // [tokens, heads * dim]
  at::Tensor lse;       // [batch, heads, length], packed [tokens, heads]
  at::Tensor q, k, v;   // [tokens, heads * dim], as the products made them
  at::Tensor h;         // [tokens, hidden]: x and attention
  at::Tensor gate, up;  // [tokens, ffn]
  at::Tensor x;         // on the host, like x
};

struct BlockResult {
  at::Tensor y;
  at::Tensor keys, values;  // [batch, length, kv_heads, dim], as attention sees them
  BlockSaved saved;
};

// keep: what the backward needs is wanted. return_kv: keys and values are.
BlockResult transformer_block_forward(const BlockInputs& inputs, const BlockTensors& weights,
                                      const BlockConfig& config, bool keep, bool return_kv);

// Returns dx, undefined where not needed. Gradients of weights are added into `grads`, in the
// accumulation type, undefined where not needed.
at::Tensor transformer_block_backward(const at::Tensor& dy, const BlockInputs& inputs,
                                      const BlockTensors& weights, const BlockConfig& config,
                                      const BlockSaved& saved, const BlockTensors& grads,
                                      bool need_dx);

// Rows of a block of `tokens`: those asked for, a multiple of 16, or where that is 0 as many as
// keep the matrix products at their rate.
int64_t block_rows(int64_t asked, int64_t tokens);

// The ops: what is not there is an empty tensor in the forward's results.
std::vector<at::Tensor> block_forward(const BlockInputs& inputs, const BlockTensors& weights,
                                      const BlockConfig& config, bool keep, bool return_kv);

// Tensors in the accumulation type that the gradients of weights `into` are added to.
struct MainGradients {
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> into;
};
// Gradients of x and of each weight in their types, undefined where not needed or in `main`.
std::vector<at::Tensor> block_backward(const at::Tensor& dy, const BlockInputs& inputs,
                                       const BlockTensors& weights, const BlockConfig& config,
                                       const BlockSaved& saved, const BlockNeeds& need,
                                       const MainGradients& main);

// The feed-forward half: activation(x Wg^T + bg) * (x Wu^T + bu) Wd^T + bd on rows [..., hidden].
struct FfnWeights {
  at::Tensor w_gate, w_up, w_down, b_gate, b_up, b_down;
};

// Those of a block.
FfnWeights ffn_weights(const BlockTensors& weights);

at::Tensor blockwise_ffn_forward(const at::Tensor& x, const FfnWeights& weights,
                                 Activation activation, int64_t rows);
at::Tensor blockwise_ffn_backward(const at::Tensor& dy, const at::Tensor& x,
                                  const FfnWeights& weights, Activation activation, int64_t rows,
                                  const FfnWeights& grads, bool need_dx);

// The op: gradients of x and of w_gate, w_up, w_down, b_gate, b_up, b_down.
std::vector<at::Tensor> ffn_backward(const at::Tensor& dy, const at::Tensor& x,
                                     const FfnWeights& weights, Activation activation, int64_t rows,
                                     const std::array<bool, 7>& need);

}  // namespace flashbpt
