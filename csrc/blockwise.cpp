// One pre-norm transformer block:
//
//   h = x + dropout(attention(rope(norm1(x) Wq^T), ...) Wo^T + bo)
//   y = h + dropout(ffn(norm2(h)))
//
// The forward makes keys and values of a group of sequences, then goes block by block of query
// rows; what is as wide as the FFN, or as long as the queries, is there for one block alone. The
// backward goes from the last block to the first: when it comes to a block, all later queries have
// added to the gradients of its keys and values, so that dx of its rows is final in the same turn.
//
// docs/blockwise.md
#include "blockwise.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "block_offload.h"
#include "blockwise_check.h"
#include "blockwise_ffn.h"
#include "blockwise_positions.h"
#include "blockwise_rows.h"
#include "check.h"
#include "linear.h"

namespace flashbpt {

BlockRows::BlockRows(const BlockInputs& inputs, const BlockConfig& config)
    : packed(inputs.cu_seqlens.has_value()) {
  batch = packed ? 1 : inputs.x.size(0);
  length = inputs.x.size(packed ? 0 : 1);
  tokens = batch * length;
  // A cut of packed rows may be anywhere in a sequence, and dropout's words come in tiles.
  const bool whole = packed && config.attention_dropout > 0;
  rows_ = whole ? std::max<int64_t>(length, 1) : block_rows(config.rows, tokens);
}

namespace {

// Sites of dropout in one block: the words of site i begin at offset + 4 i.
enum Site : int64_t { kAttentionSite, kAttentionResidualSite, kFfnResidualSite };

// The rows' kernels read vectors of weights as they lie, in the rows' type.
at::Tensor vector_of(const at::Tensor& weight, at::ScalarType dtype) {
  return weight.defined() ? weight.to(dtype).contiguous() : weight;
}

Norm norm_of(NormKind kind, double eps, const at::Tensor& weight, const at::Tensor& bias,
             at::ScalarType dtype) {
  return {kind, eps, vector_of(weight, dtype), vector_of(bias, dtype)};
}

class Block {
 public:
  Block(const BlockInputs& inputs, const BlockTensors& weights, const BlockConfig& config)
      : in_(inputs),
        w_(weights),
        c_(config),
        rows_(inputs, config),
        hidden_(inputs.x.size(-1)),
        dim_(weights[kWq].size(0) / config.heads),
        options_(weights[kWq].options()),
        stream_options_(options_.dtype(inputs.x.scalar_type())),
        x_(inputs.x.reshape({-1, hidden_}).contiguous(), options_.device()),
        positions_(inputs, config, rows_, dim_, options_),
        norm1_(norm_of(config.norm, config.eps, weights[kNorm1], weights[kNorm1Bias],
                       inputs.x.scalar_type())),
        norm2_(norm_of(config.norm, config.eps, weights[kNorm2], weights[kNorm2Bias],
                       inputs.x.scalar_type())),
        q_norm_(norm_of(NormKind::kRms, config.eps, weights[kQNorm], {}, dtype())),
        k_norm_(norm_of(NormKind::kRms, config.eps, weights[kKNorm], {}, dtype())),
        ffn_(ffn_weights(weights)) {
    // In the accumulation type, so that their gradients come in it.
    if (weights[kSinks].defined()) sinks_ = weights[kSinks].to(accumulator());
  }

  BlockResult forward(bool keep, bool return_kv) {
    BlockResult r;
    r.y = at::empty(in_.x.sizes(), stream_options_);
    const at::Tensor y = r.y.view({-1, hidden_});
    const bool all = keep && c_.save == BlockSave::kAll;
    const auto rows = [&](bool wanted, int64_t width) {
      return wanted ? at::empty({rows_.tokens, width}, options_) : at::Tensor();
    };
    BlockSaved& s = r.saved;
    std::optional<HostWriter> to_host;
    if (keep && c_.offload && options_.device().is_cuda()) {
      to_host.emplace(options_.device());
      s.x = to_host->empty(in_.x.sizes(), in_.x.scalar_type());
      to_host->write(s.x, in_.x);
    }
    if (keep && c_.save != BlockSave::kX) {
      const std::array<int64_t, 2> sizes{rows_.tokens, c_.heads * dim_};
      s.out = to_host ? to_host->empty(sizes, dtype()) : at::empty(sizes, options_);
      s.lse = at::empty(lse_sizes(), options_.dtype(accumulator()));
    }
    s.q = rows(all, c_.heads * dim_);
    s.k = rows(all, c_.kv_heads * dim_);
    s.v = rows(all, c_.kv_heads * dim_);
    if (all) s.h = at::empty({rows_.tokens, hidden_}, stream_options_);
    s.gate = rows(all && w_[kWGate].defined(), w_[kWUp].size(0));
    s.up = rows(all, w_[kWUp].size(0));
    if (return_kv) {
      r.keys = at::empty(kv_sizes(), options_);
      r.values = at::empty(kv_sizes(), options_);
    }
    rows_.for_each_group([&](const BlockGroup& g) {
      const KeysValues kv = keys_values(g, s, all ? KvFrom::kKept : KvFrom::kMade);
      if (return_kv) {
        rows_of(r.keys, g).copy_(kv.k);
        rows_of(r.values, g).copy_(kv.v);
      }
      rows_.for_each_block(g, /*descending=*/false, [&](const RowBlock& b) {
        const at::Tensor x = x_rows(g, b);
        const at::Tensor q_made = product(normalized(x, norm1_), kWq, kBq, rows_of(s.q, g, b));
        const at::Tensor q = turned(q_made, c_.heads, q_norm_, positions_.rope(g, b), /*keep=*/all);
        const Attended a = attend(q, kv, g, b);
        if (s.out.defined()) {
          const at::Tensor kept = rows_of(s.out, g, b);
          to_host ? to_host->write(kept, a.out) : void(kept.copy_(a.out));
          lse_of(s.lse, g, b).copy_(a.lse);
        }
        const at::Tensor h = attention_residual(x, a.out, rows_of(s.h, g, b), g, b);
        const FfnHidden hidden = ffn_hidden(normalized(h, norm2_), ffn_);
        if (all) {
          rows_of(s.up, g, b).copy_(hidden.up);
          if (s.gate.defined()) rows_of(s.gate, g, b).copy_(hidden.gate);
        }
        const at::Tensor f = at::empty(h.sizes(), options_);
        ffn_output(hidden, ffn_, c_.activation, at::Tensor(), f);
        residual_forward(f, vector_of(w_[kBDown], dtype()), dropout(kFfnResidualSite, g, b), h,
                         rows_of(y, g, b));
        if (rows_.packed) rows_of(y, g, b).masked_fill_(rows_of(positions_.padding, g, b), 0);
      });
    });
    return r;
  }

  at::Tensor backward(const at::Tensor& grad, const BlockSaved& s, const BlockTensors& grads,
                      bool need_dx) {
    const at::Tensor dy = grad.reshape({-1, hidden_}).contiguous();
    const at::Tensor dx = need_dx ? at::empty(in_.x.sizes(), stream_options_) : at::Tensor();
    const at::Tensor flat_dx = need_dx ? dx.view({-1, hidden_}) : dx;
    const auto any = [&](std::initializer_list<BlockWeight> which) {
      return std::any_of(which.begin(), which.end(),
                         [&](BlockWeight i) { return grads[i].defined(); });
    };
    // What has a gradient before attention, and before its output projection.
    const bool before =
        need_dx || any({kNorm1, kNorm1Bias, kWq, kBq, kWk, kBk, kWv, kBv, kQNorm, kKNorm, kSinks});
    const bool before_ffn = before || any({kWo, kBo, kNorm2, kNorm2Bias});
    const FfnWeights ffn_grads = ffn_weights(grads);
    const bool all = c_.save == BlockSave::kAll;
    const bool again = c_.save == BlockSave::kX;  // attention is computed again

    HostReader out(s.out, options_.device());
    rows_.for_each_group([&](const BlockGroup& g) {
      KeysValues kv;
      at::Tensor dk, dv;  // in the accumulation type, complete up to the block of the turn
      if (before || again) kv = keys_values(g, s, all ? KvFrom::kSaved : KvFrom::kMade);
      if (before) {
        dk = at::zeros(kv.k.sizes(), options_.dtype(accumulator()));
        dv = at::zeros(kv.v.sizes(), options_.dtype(accumulator()));
      }
      rows_.for_each_block(g, /*descending=*/true, [&](const RowBlock& b) {
        const at::Tensor x = x_rows(g, b);
        const at::Tensor dy_block = without_padding(rows_of(dy, g, b), g, b);
        const Rope rope = positions_.rope(g, b);
        // What the forward had.
        at::Tensor n1, q_made, q;
        if (before || again) {
          n1 = normalized(x, norm1_);
          q_made = all ? rows_of(s.q, g, b) : product(n1, kWq, kBq);
          q = turned(q_made, c_.heads, q_norm_, rope, /*keep=*/all || q_norm_.weight.defined());
        }
        Attended a;
        if (again)
          a = attend(q, kv, g, b);
        else
          a = {out.get(first_row(g, b), g.sequences * b.count), lse_of(s.lse, g, b)};
        const RowBlock next = rows_.before(b);
        x_.prefetch(first_row(g, next), g.sequences * next.count);
        if (!again) out.prefetch(first_row(g, next), g.sequences * next.count);
        const at::Tensor h =
            all ? rows_of(s.h, g, b) : attention_residual(x, a.out, at::Tensor(), g, b);
        const at::Tensor n2 = normalized(h, norm2_);
        FfnHidden hidden;
        if (all)
          hidden = {s.gate.defined() ? rows_of(s.gate, g, b).clone() : at::Tensor(),
                    rows_of(s.up, g, b).clone()};
        else
          hidden = ffn_hidden(n2, ffn_);

        // y = h + dropout(ffn(norm2(h)))
        const at::Tensor df = dropped(dy_block, dropout(kFfnResidualSite, g, b));
        const at::Tensor dn2 = before_ffn ? at::empty_like(n2) : at::Tensor();
        ffn_gradients(df, n2, hidden, ffn_, c_.activation, ffn_grads, dn2);
        hidden = {};
        if (!before_ffn) return;
        const at::Tensor dh = at::empty_like(h);
        norm_backward(dn2, h, norm2_, dy_block, dh, {grads[kNorm2], grads[kNorm2Bias]});

        // h = x + dropout(o Wo^T + bo)
        const at::Tensor dz = dropped(dh, dropout(kAttentionResidualSite, g, b));
        linear_weight_gradients(dz, a.out, grads[kWo], grads[kBo]);
        if (!before) return;
        const at::Tensor d_out = at::empty_like(a.out);
        linear_input_gradient(dz, w_[kWo], d_out, false);

        // o = attention(q, k, v)
        const at::Tensor dq = attend_backward(d_out, q, kv, a, dk, dv, grads[kSinks], g, b);
        rope_backward(heads_of(dq, c_.heads), heads_of(q_made, c_.heads), q_norm_, rope,
                      heads_of(dq, c_.heads), {grads[kQNorm], {}});
        at::Tensor k_made;
        if (k_norm_.weight.defined()) k_made = all ? rows_of(s.k, g, b) : product(n1, kWk, kBk);
        const at::Tensor dk_block = at::empty({x.size(0), c_.kv_heads * dim_}, options_);
        rope_backward(rows_of(dk, g, b, g.token).view({-1, c_.kv_heads, dim_}),
                      heads_of(k_made, c_.kv_heads), k_norm_, rope, heads_of(dk_block, c_.kv_heads),
                      {grads[kKNorm], {}});
        const at::Tensor dv_block =
            rows_of(dv, g, b, g.token).reshape({-1, c_.kv_heads * dim_}).to(dtype());

        // q, k, v = norm1(x) W^T
        linear_weight_gradients(dq, n1, grads[kWq], grads[kBq]);
        linear_weight_gradients(dk_block, n1, grads[kWk], grads[kBk]);
        linear_weight_gradients(dv_block, n1, grads[kWv], grads[kBv]);
        if (!need_dx && !grads[kNorm1].defined() && !grads[kNorm1Bias].defined()) return;
        const at::Tensor& dn1 = dn2;  // its memory
        linear_input_gradient(dq, w_[kWq], dn1, false);
        linear_input_gradient(dk_block, w_[kWk], dn1, true);
        linear_input_gradient(dv_block, w_[kWv], dn1, true);
        norm_backward(dn1, x, norm1_, dh, need_dx ? rows_of(flat_dx, g, b) : dh,
                      {grads[kNorm1], grads[kNorm1Bias]});
      });
    });
    return dx;
  }

 private:
  // Where keys and values come from: the products, kept or not, or what was kept.
  enum class KvFrom { kMade, kKept, kSaved };

  // Of a group, [tokens, kv_heads, dim], as attention sees them.
  struct KeysValues {
    at::Tensor k, v;
  };
  struct Attended {
    at::Tensor out, lse;  // [rows, heads * dim], and as lse_of has it
  };

  at::ScalarType dtype() const { return c10::typeMetaToScalarType(options_.dtype()); }
  at::ScalarType accumulator() const { return accumulation_dtype(dtype()); }

  // ------------------------------------------------------------------------------------ rows

  int64_t first_row(const BlockGroup& g, const RowBlock& b) const { return g.token + b.begin; }
  at::Tensor x_rows(const BlockGroup& g, const RowBlock& b) {
    return without_padding(x_.get(first_row(g, b), g.sequences * b.count), g, b);
  }
  // Zeros where packed rows are past the last sequence, whatever is there.
  at::Tensor without_padding(const at::Tensor& rows, const BlockGroup& g, const RowBlock& b) const {
    return rows_.packed ? rows.masked_fill(rows_of(positions_.padding, g, b), 0) : rows;
  }
  // A block's rows of something that has a row for each token from `origin` on.
  at::Tensor rows_of(const at::Tensor& t, const BlockGroup& g, const RowBlock& b,
                     int64_t origin = 0) const {
    if (!t.defined()) return t;
    return t.narrow(0, g.token - origin + b.begin, g.sequences * b.count);
  }
  at::Tensor rows_of(const at::Tensor& t, const BlockGroup& g) const {
    return t.view({-1, c_.kv_heads, dim_}).narrow(0, g.token, g.tokens());
  }
  at::Tensor heads_of(const at::Tensor& t, int64_t heads) const {
    return t.defined() ? t.view({-1, heads, dim_}) : t;
  }
  std::vector<int64_t> lse_sizes() const {
    if (rows_.packed) return {rows_.tokens, c_.heads};
    return {rows_.batch, c_.heads, rows_.length};
  }
  std::vector<int64_t> kv_sizes() const {
    if (rows_.packed) return {rows_.tokens, c_.kv_heads, dim_};
    return {rows_.batch, rows_.length, c_.kv_heads, dim_};
  }
  at::Tensor lse_of(const at::Tensor& lse, const BlockGroup& g, const RowBlock& b) const {
    if (rows_.packed) return lse.narrow(0, b.begin, b.count);
    return lse.narrow(0, g.first, g.sequences).narrow(2, b.begin, b.count);
  }

  // ------------------------------------------------------------------------- between products

  at::Tensor normalized(const at::Tensor& x, const Norm& norm) const {
    const at::Tensor out = at::empty(x.sizes(), options_);
    norm_forward(x, norm, out);
    return out;
  }
  // x W^T + b into `to`, or into new memory.
  at::Tensor product(const at::Tensor& x, BlockWeight weight, BlockWeight bias,
                     at::Tensor to = {}) const {
    if (!to.defined()) to = at::empty({x.size(0), w_[weight].size(0)}, x.options());
    linear(x, w_[weight], w_[bias], to);
    return to;
  }
  // rope(norm(heads)) [rows, heads, dim]; in place unless what was made is to be kept.
  at::Tensor turned(const at::Tensor& made, int64_t heads, const Norm& norm, const Rope& rope,
                    bool keep) const {
    const at::Tensor from = heads_of(made, heads);
    if (!norm.weight.defined() && !c_.rotary) return from;
    const at::Tensor to = keep ? at::empty_like(from) : from;
    rope_forward(from, norm, rope, to);
    return to;
  }
  // The gradient of what was added to the residual stream, in the products' type.
  at::Tensor dropped(const at::Tensor& dy, const RowDropout& dropout) const {
    if (!dropout.rng_state) return dy.to(dtype());
    const at::Tensor dx = at::empty_like(dy);
    dropout_backward(dy, dropout, dx);
    return dx.to(dtype());
  }
  RowDropout dropout(Site site, const BlockGroup& g, const RowBlock& b) const {
    RowDropout d;
    if (c_.residual_dropout == 0) return d;
    d.rng_state = in_.rng_state->const_data_ptr<int64_t>();
    d.site = site;
    d.token = g.token + b.begin;
    d.threshold = static_cast<uint64_t>(std::ceil(std::ldexp(c_.residual_dropout, 32)));
    d.scale = c_.residual_dropout < 1 ? 1 / (1 - c_.residual_dropout) : 0;
    return d;
  }
  at::Tensor attention_residual(const at::Tensor& x, const at::Tensor& out, const at::Tensor& to,
                                const BlockGroup& g, const RowBlock& b) const {
    const at::Tensor h = to.defined() ? to : at::empty_like(x);
    const at::Tensor z = x.scalar_type() == dtype() ? h : at::empty(x.sizes(), options_);
    linear(out, w_[kWo], at::Tensor(), z);
    residual_forward(z, vector_of(w_[kBo], dtype()), dropout(kAttentionResidualSite, g, b), x, h);
    return h;
  }

  // ------------------------------------------------------------------------------- attention

  // Blocks of rows bound what is made on the way.
  KeysValues keys_values(const BlockGroup& g, const BlockSaved& s, KvFrom from) {
    KeysValues kv;
    const bool keep = from != KvFrom::kMade;
    kv.k = at::empty({g.tokens(), c_.kv_heads, dim_}, options_);
    kv.v = keep ? heads_of(s.v, c_.kv_heads).narrow(0, g.token, g.tokens()) : at::empty_like(kv.k);
    rows_.for_each_block(g, /*descending=*/false, [&](const RowBlock& b) {
      const at::Tensor k = rows_of(kv.k, g, b, g.token);
      at::Tensor k_made = k.flatten(1);
      if (keep) k_made = rows_of(s.k, g, b);
      if (from != KvFrom::kSaved) {
        const at::Tensor n1 = normalized(x_rows(g, b), norm1_);
        product(n1, kWk, kBk, k_made);
        product(n1, kWv, kBv, rows_of(kv.v, g, b, g.token).flatten(1));
      }
      rope_or_copy(k_made, k, g, b);
    });
    return kv;
  }
  void rope_or_copy(const at::Tensor& made, const at::Tensor& k, const BlockGroup& g,
                    const RowBlock& b) const {
    if (k_norm_.weight.defined() || c_.rotary)
      rope_forward(heads_of(made, c_.kv_heads), k_norm_, positions_.rope(g, b), k);
    else if (made.data_ptr() != k.data_ptr())
      k.copy_(heads_of(made, c_.kv_heads));
  }

  AttentionOptions attention_options(const BlockGroup& g, const RowBlock& b) const {
    AttentionOptions o{};
    if (sinks_.defined()) o.sinks = sinks_;
    if (rows_.packed) o.cu_seqlens_q = o.cu_seqlens_k = in_.cu_seqlens;
    if (c_.attention_dropout > 0) o.rng_state = in_.rng_state;
    o.scale = c_.scale;
    o.causal = true;
    o.window_left = c_.window_left;
    o.window_right = -1;
    o.softcap = c_.softcap;
    o.dropout_p = c_.attention_dropout;
    o.q_offset = b.begin;
    o.batch_offset = g.first;
    o.backend = c_.backend;
    return o;
  }
  // A block's rows as attention takes them: (batch, heads, rows, dim), or packed (rows, heads,
  // dim).
  at::Tensor query_view(const at::Tensor& rows, const BlockGroup& g, const RowBlock& b) const {
    const at::Tensor t = rows.view({-1, c_.heads, dim_});
    if (rows_.packed) return t;
    return t.view({g.sequences, b.count, c_.heads, dim_}).transpose(1, 2);
  }
  // Of the group's keys those that the block sees: up to its last row.
  at::Tensor key_view(const at::Tensor& keys, const BlockGroup& g, const RowBlock& b) const {
    if (rows_.packed) return keys;
    return keys.view({g.sequences, g.length, c_.kv_heads, dim_})
        .narrow(1, 0, b.end())
        .transpose(1, 2);
  }
  at::Tensor rows_view(const at::Tensor& out) const {
    return (rows_.packed ? out : out.transpose(1, 2)).reshape({-1, c_.heads * dim_});
  }
  Attended attend(const at::Tensor& q, const KeysValues& kv, const BlockGroup& g,
                  const RowBlock& b) const {
    const auto [out, lse, lse_lo, tiles] = attention_forward(
        query_view(q, g, b), key_view(kv.k, g, b), key_view(kv.v, g, b), attention_options(g, b));
    return {rows_view(out), lse};
  }
  // Returns dq [rows, heads * dim] and adds to dk, dv and the sinks' gradient.
  at::Tensor attend_backward(const at::Tensor& d_out, const at::Tensor& q, const KeysValues& kv,
                             const Attended& a, const at::Tensor& dk, const at::Tensor& dv,
                             at::Tensor dsinks, const BlockGroup& g, const RowBlock& b) const {
    const auto [dq, dmask, dsinks_block, dalibi] = attention_backward_accumulate(
        query_view(d_out, g, b), std::nullopt, query_view(q, g, b), key_view(kv.k, g, b),
        key_view(kv.v, g, b), {query_view(a.out, g, b), a.lse, std::nullopt, std::nullopt},
        attention_options(g, b), c_.deterministic,
        {true, true, true, false, dsinks.defined(), false}, key_view(dk, g, b), key_view(dv, g, b));
    if (dsinks.defined()) dsinks.add_(dsinks_block);
    return rows_view(dq);
  }

  const BlockInputs& in_;
  const BlockTensors& w_;
  const BlockConfig& c_;
  const BlockRows rows_;
  const int64_t hidden_, dim_;
  const at::TensorOptions options_;         // of rows on the device
  const at::TensorOptions stream_options_;  // of the residual stream: x, h, y
  HostReader x_;                            // [tokens, hidden]
  const BlockPositions positions_;
  const Norm norm1_, norm2_, q_norm_, k_norm_;
  const FfnWeights ffn_;
  at::Tensor sinks_;
};

}  // namespace

BlockResult transformer_block_forward(const BlockInputs& inputs, const BlockTensors& weights,
                                      const BlockConfig& config, bool keep, bool return_kv) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  check_block(inputs, weights, config);
  const c10::DeviceGuard device_guard(weights[kWq].device());
  return Block(inputs, weights, config).forward(keep, return_kv);
}

at::Tensor transformer_block_backward(const at::Tensor& dy, const BlockInputs& inputs,
                                      const BlockTensors& weights, const BlockConfig& config,
                                      const BlockSaved& saved, const BlockTensors& grads,
                                      bool need_dx) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  check_block(inputs, weights, config);
  const c10::DeviceGuard device_guard(weights[kWq].device());
  return Block(inputs, weights, config).backward(dy, saved, grads, need_dx);
}

}  // namespace flashbpt
