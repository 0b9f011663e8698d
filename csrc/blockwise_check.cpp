#include "blockwise_check.h"

#include "attention.h"
#include "check.h"

namespace flashbpt {
namespace {

void check_weight(const char* name, const at::Tensor& t, at::IntArrayRef sizes,
                  const at::Tensor& like, bool any_dtype = false) {
  if (!t.defined()) return;
  TORCH_CHECK(t.sizes() == sizes, "flashbpt: ", name, " must have shape ", sizes, ", got ",
              t.sizes());
  TORCH_CHECK(any_dtype || t.scalar_type() == like.scalar_type(), "flashbpt: ", name,
              " must have the dtype of the other weights, ", like.scalar_type(), ", got ",
              t.scalar_type());
  TORCH_CHECK(t.device() == like.device(), "flashbpt: ", name, " must be on ", like.device(),
              " as the others, got ", t.device());
}

// Weights for `hidden` columns, of like's type and device.
void check_ffn(int64_t hidden, const at::Tensor& like, const FfnWeights& w) {
  TORCH_CHECK(is_attention_dtype(like.scalar_type()),
              "flashbpt: x and weights must be float32, bfloat16, float16 or float64, got ",
              like.scalar_type());
  TORCH_CHECK(w.w_up.dim() == 2, "flashbpt: w_up must be (ffn, hidden), got ", w.w_up.sizes());
  const int64_t ffn = w.w_up.size(0);
  const auto check = [&](const char* name, const at::Tensor& t, at::IntArrayRef sizes) {
    check_weight(name, t, sizes, like);
  };
  check("w_up", w.w_up, {ffn, hidden});
  check("w_gate", w.w_gate, {ffn, hidden});
  check("w_down", w.w_down, {hidden, ffn});
  check("b_up", w.b_up, {ffn});
  check("b_gate", w.b_gate, {ffn});
  check("b_down", w.b_down, {hidden});
  TORCH_CHECK(
      w.w_gate.defined() || !w.b_gate.defined(),
      "flashbpt: b_gate was given without w_gate; an FFN that is not gated takes b_up alone");
}

}  // namespace

void check_ffn_rows(const at::Tensor& x, const FfnWeights& w) {
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) > 0,
              "flashbpt: x must have a last dimension of hidden columns, one at least, got shape ",
              x.sizes());
  check_ffn(x.size(-1), x, w);
}

void check_block(const BlockInputs& inputs, const BlockTensors& weights,
                 const BlockConfig& config) {
  const at::Tensor& x = inputs.x;
  const bool packed = inputs.cu_seqlens.has_value();
  TORCH_CHECK(x.dim() == (packed ? 2 : 3), "flashbpt: x must be ",
              packed ? "(tokens, hidden) with cu_seqlens" : "(batch, length, hidden)",
              ", got shape ", x.sizes());
  TORCH_CHECK(x.size(-1) > 0, "flashbpt: x must have one hidden column at least, got shape ",
              x.sizes());
  TORCH_CHECK(config.heads > 0 && config.kv_heads > 0 && config.heads % config.kv_heads == 0,
              "flashbpt: kv_heads must divide heads, got ", config.heads, " heads and ",
              config.kv_heads, " kv_heads");
  TORCH_CHECK(weights[kWq].dim() == 2 && weights[kWq].size(0) % config.heads == 0,
              "flashbpt: wq must be (heads * dim, hidden) with ", config.heads, " heads, got ",
              weights[kWq].sizes());
  const int64_t hidden = x.size(-1), dim = weights[kWq].size(0) / config.heads;
  const int64_t width_q = config.heads * dim, width_kv = config.kv_heads * dim;
  const at::Tensor& like = weights[kWq];
  const auto check = [&](const char* name, BlockWeight i, at::IntArrayRef sizes) {
    check_weight(name, weights[i], sizes, like);
  };
  // Norms' weights may be of another type than the matrices.
  const auto check_norm = [&](const char* name, BlockWeight i, at::IntArrayRef sizes) {
    if (!weights[i].defined()) return;
    TORCH_CHECK(weights[i].is_floating_point(), "flashbpt: ", name, " must be floating point, got ",
                weights[i].scalar_type());
    check_weight(name, weights[i], sizes, like, /*any_dtype=*/true);
  };
  // A residual stream in fp32 over products in 16 bits is autocast's. In the backward x may wait on
  // the host.
  const bool wide = x.scalar_type() == at::kFloat && like.element_size() == 2;
  TORCH_CHECK(x.scalar_type() == like.scalar_type() || wide, "flashbpt: x must have the weights' ",
              "dtype ", like.scalar_type(), ", or be float32 over weights of 16 bits, got ",
              x.scalar_type());
  TORCH_CHECK(x.device() == like.device() || (config.offload && x.is_cpu()),
              "flashbpt: x must be on the weights' device ", like.device(), ", got ", x.device());
  check_norm("norm1", kNorm1, {hidden});
  check_norm("norm1_bias", kNorm1Bias, {hidden});
  check("wq", kWq, {width_q, hidden});
  check("bq", kBq, {width_q});
  check("wk", kWk, {width_kv, hidden});
  check("bk", kBk, {width_kv});
  check("wv", kWv, {width_kv, hidden});
  check("bv", kBv, {width_kv});
  check_norm("q_norm", kQNorm, {dim});
  check_norm("k_norm", kKNorm, {dim});
  check_norm("sinks", kSinks, {config.heads});
  check("wo", kWo, {hidden, width_q});
  check("bo", kBo, {hidden});
  check_norm("norm2", kNorm2, {hidden});
  check_norm("norm2_bias", kNorm2Bias, {hidden});
  check_ffn(hidden, like, ffn_weights(weights));
  TORCH_CHECK(inputs.cos.has_value() == inputs.sin.has_value(),
              "flashbpt: cos and sin go together, got one of them");
  if (inputs.cos) {
    TORCH_CHECK(config.rotary,
                "flashbpt: cos and sin were given, but rope is off; set rope to "
                "'half' or 'interleaved'");
    TORCH_CHECK(inputs.cos->is_floating_point() && inputs.sin->is_floating_point() &&
                    inputs.cos->device() == like.device() && inputs.sin->device() == like.device(),
                "flashbpt: cos and sin must be floating point on ", like.device(), ", got ",
                inputs.cos->scalar_type(), " on ", inputs.cos->device(), " and ",
                inputs.sin->scalar_type(), " on ", inputs.sin->device());
    TORCH_CHECK(inputs.cos->dim() == 2 && inputs.cos->sizes() == inputs.sin->sizes() &&
                    2 * inputs.cos->size(1) <= dim,
                "flashbpt: cos and sin must be (positions, pairs) with at most ", dim / 2,
                " pairs, got ", inputs.cos->sizes(), " and ", inputs.sin->sizes());
    // Packed lengths are on the device.
    const int64_t length = packed ? std::min<int64_t>(x.size(0), 1) : x.size(1);
    TORCH_CHECK(inputs.cos->size(0) >= length, "flashbpt: cos and sin have ", inputs.cos->size(0),
                " positions, but x has ", length);
  } else {
    TORCH_CHECK(!config.rotary || dim % 2 == 0, "flashbpt: rope needs an even head dim, got ", dim);
  }
  if (packed) {
    const at::Tensor& cu = *inputs.cu_seqlens;
    TORCH_CHECK(cu.dim() == 1 && cu.numel() > 0 && cu.device() == like.device() &&
                    (cu.scalar_type() == at::kInt || cu.scalar_type() == at::kLong),
                "flashbpt: cu_seqlens must be one dimension of int32 or int64 on ", like.device(),
                " with one element at least, got ", cu.scalar_type(), " ", cu.sizes(), " on ",
                cu.device());
    if (cu.is_cpu()) check_cu_seqlens(cu, x.size(0), "cu_seqlens");
  }
  const bool draws = config.attention_dropout > 0 || config.residual_dropout > 0;
  TORCH_CHECK(!draws || inputs.rng_state, "flashbpt: dropout needs rng_state");
}

}  // namespace flashbpt
