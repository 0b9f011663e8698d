// Every op of the library: the table of contents of csrc. Names and schemas are public.
//
// Attention kernels take their arguments from the stack: one place (`options_at`) then knows the
// order that the schemas share.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "attention.h"
#include "blockwise.h"
#include "merge_states.h"
#include "paged.h"

namespace flashbpt {
namespace {

using Stack = torch::jit::Stack;
using Arguments = c10::ArrayRef<c10::IValue>;

const std::string kOptions =
    "Tensor? mask, Tensor? sinks, Tensor? alibi_slopes, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? rng_state, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "float? scale, bool causal, SymInt window_left, SymInt window_right, float softcap, "
    "float dropout_p, SymInt q_offset, SymInt k_offset, SymInt batch_offset, SymInt head_offset, "
    "SymInt total_heads, SymInt diagonal, int backend";
constexpr size_t kOptionCount = 21;
const std::string kSaved =
    "Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? lse_lo, Tensor? mask_tiles, ";
constexpr size_t kSavedCount = 9;
// q, the caches and the page table, then the options of paged attention.
const std::string kPaged =
    "Tensor q, Tensor key_cache, Tensor value_cache, Tensor page_entries, Tensor? page_rows, "
    "Tensor? page_indptr, Tensor? last_page_len, bool slots, Tensor? seq_lens, "
    "Tensor? cu_seqlens_q, Tensor? tree_mask, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? key_scale, Tensor? value_scale, SymInt? max_seqlen_q, float? scale, bool causal, "
    "SymInt window_left, SymInt window_right, float softcap, int backend";
constexpr size_t kPagedCount = 22;

// What a transformer block reads: x, its weights as blockwise.h orders them, then its options.
const std::string kBlock =
    "Tensor x, Tensor? norm1, Tensor? norm1_bias, Tensor wq, Tensor? bq, Tensor wk, Tensor? bk, "
    "Tensor wv, Tensor? bv, Tensor? q_norm, Tensor? k_norm, Tensor? sinks, Tensor wo, Tensor? bo, "
    "Tensor? norm2, Tensor? norm2_bias, Tensor? w_gate, Tensor? b_gate, Tensor w_up, Tensor? b_up, "
    "Tensor w_down, Tensor? b_down, Tensor? cos, Tensor? sin, Tensor? cu_seqlens, "
    "Tensor? rng_state, int heads, int kv_heads, int norm, float eps, int activation, bool rotary, "
    "bool interleaved, float rope_theta, float? scale, SymInt window_left, float softcap, "
    "float attention_dropout, float residual_dropout, int save, bool offload, SymInt rows, int "
    "backend";
constexpr size_t kBlockCount = 26 + 17;
const std::string kBlockSaved =
    "Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor h, Tensor gate, Tensor up, "
    "Tensor x_host";
constexpr size_t kBlockSavedCount = 9;
const std::string kBlockGradients =
    "(Tensor x, Tensor norm1, Tensor norm1_bias, Tensor wq, Tensor bq, Tensor wk, Tensor bk, "
    "Tensor wv, Tensor bv, Tensor q_norm, Tensor k_norm, Tensor sinks, Tensor wo, Tensor bo, "
    "Tensor norm2, Tensor norm2_bias, Tensor w_gate, Tensor b_gate, Tensor w_up, Tensor b_up, "
    "Tensor w_down, Tensor b_down)";
const std::string kFfn =
    "Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, "
    "Tensor? b_down, int activation, SymInt rows";

AttentionOptions options_at(Arguments a) {
  const auto tensor = [&](size_t i) { return a[i].toOptional<at::Tensor>(); };
  return {tensor(0),
          tensor(1),
          tensor(2),
          tensor(3),
          tensor(4),
          tensor(5),
          a[6].toOptional<int64_t>(),
          a[7].toOptional<int64_t>(),
          a[8].toOptional<double>(),
          a[9].toBool(),
          a[10].toInt(),
          a[11].toInt(),
          a[12].toDouble(),
          a[13].toDouble(),
          a[14].toInt(),
          a[15].toInt(),
          a[16].toInt(),
          a[17].toInt(),
          a[18].toInt(),
          a[19].toInt(),
          a[20].toInt()};
}

AttentionSaved saved_at(Arguments a) {
  return {a[5].toTensor(), a[6].toTensor(), a[7].toOptional<at::Tensor>(),
          a[8].toOptional<at::Tensor>()};
}

PageTable page_table_at(Arguments a) {
  return {a[3].toTensor(), a[4].toOptional<at::Tensor>(), a[5].toOptional<at::Tensor>(),
          a[6].toOptional<at::Tensor>(), a[7].toBool()};
}

PagedOptions paged_options_at(Arguments a) {
  const auto tensor = [&](size_t i) { return a[i].toOptional<at::Tensor>(); };
  return {tensor(8),
          tensor(9),
          tensor(10),
          tensor(11),
          tensor(12),
          tensor(13),
          tensor(14),
          a[15].toOptional<int64_t>(),
          a[16].toOptional<double>(),
          a[17].toBool(),
          a[18].toInt(),
          a[19].toInt(),
          a[20].toDouble(),
          a[21].toInt()};
}

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isNone() ? at::Tensor() : value.toTensor();
}

BlockInputs block_inputs_at(Arguments a) {
  const auto tensor = [&](size_t i) { return a[i].toOptional<at::Tensor>(); };
  constexpr size_t n = 1 + kBlockWeights;
  return {a[0].toTensor(), tensor(n), tensor(n + 1), tensor(n + 2), tensor(n + 3)};
}

BlockTensors block_weights_at(Arguments a) {
  BlockTensors weights;
  for (size_t i = 0; i < kBlockWeights; ++i) weights[i] = tensor_or_none(a[1 + i]);
  return weights;
}

BlockConfig block_config_at(Arguments arguments) {
  const Arguments a = arguments.slice(1 + kBlockWeights + 4);
  return {a[0].toInt(),
          a[1].toInt(),
          static_cast<NormKind>(a[2].toInt()),
          a[3].toDouble(),
          static_cast<Activation>(a[4].toInt()),
          a[5].toBool(),
          a[6].toBool(),
          a[7].toDouble(),
          a[8].toOptional<double>(),
          a[9].toInt(),
          a[10].toDouble(),
          a[11].toDouble(),
          a[12].toDouble(),
          static_cast<BlockSave>(a[13].toInt()),
          a[14].toBool(),
          a[15].toInt(),
          /*deterministic=*/false,
          a[16].toInt()};
}

BlockSaved block_saved_at(Arguments a) {
  const auto tensor = [&](size_t i) {
    const at::Tensor& t = a[i].toTensor();
    return t.numel() == 0 ? at::Tensor() : t;
  };
  return {tensor(0), tensor(1), tensor(2), tensor(3), tensor(4),
          tensor(5), tensor(6), tensor(7), tensor(8)};
}

FfnWeights ffn_weights_at(Arguments a) {
  return {tensor_or_none(a[1]), a[2].toTensor(),      a[3].toTensor(),
          tensor_or_none(a[4]), tensor_or_none(a[5]), tensor_or_none(a[6])};
}

template <size_t kCount>
std::array<bool, kCount> need_at(const c10::IValue& value) {
  const auto list = value.toBoolList();
  std::array<bool, kCount> need{};
  std::copy(list.begin(), list.end(), need.begin());
  return need;
}

// Takes the arguments of `op` off the stack and puts the results of f(arguments) there.
template <typename F>
void call(const c10::OperatorHandle& op, Stack* stack, const F& f) {
  const size_t n = op.schema().arguments().size();
  const auto results = f(torch::jit::last(*stack, n));
  torch::jit::drop(*stack, n);
  if constexpr (std::is_same_v<decltype(results), const std::vector<at::Tensor>>)
    stack->insert(stack->end(), results.begin(), results.end());
  else
    std::apply([&](const auto&... r) { (stack->emplace_back(r), ...); }, results);
}

void forward_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    return attention_forward(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(),
                             options_at(a.slice(3)));
  });
}

void backward_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    constexpr size_t n = kSavedCount + kOptionCount;
    return attention_backward(a[0].toTensor(), a[1].toOptional<at::Tensor>(), a[2].toTensor(),
                              a[3].toTensor(), a[4].toTensor(), saved_at(a),
                              options_at(a.slice(kSavedCount)), a[n].toBool(),
                              need_at<6>(a[n + 1]));
  });
}

void backward_accumulate_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    constexpr size_t n = kSavedCount + kOptionCount;
    return attention_backward_accumulate(
        a[0].toTensor(), a[1].toOptional<at::Tensor>(), a[2].toTensor(), a[3].toTensor(),
        a[4].toTensor(), saved_at(a), options_at(a.slice(kSavedCount)), a[n].toBool(),
        need_at<6>(a[n + 1]), a[n + 2].toTensor(), a[n + 3].toTensor());
  });
}

void kernel_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    return std::make_tuple(attention_kernel(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(),
                                            options_at(a.slice(3)), a[3 + kOptionCount].toBool()));
  });
}

void paged_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    return paged_attention(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), page_table_at(a),
                           paged_options_at(a));
  });
}

void check_paged_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    check_paged_attention(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), page_table_at(a),
                          paged_options_at(a));
    return std::make_tuple();
  });
}

void paged_kernel_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    return std::make_tuple(paged_attention_kernel(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(),
                                                  page_table_at(a), paged_options_at(a)));
  });
}

void paged_out_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    return std::make_tuple(paged_attention_out(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(),
                                               page_table_at(a), paged_options_at(a),
                                               a[kPagedCount].toTensor()));
  });
}

void append_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    const auto tensor = [&](size_t i) { return a[i].toOptional<at::Tensor>(); };
    append_paged_kv(a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[3].toTensor(),
                    a[4].toTensor(),
                    {tensor(5), tensor(6), tensor(7), a[8].toBool(), tensor(9), tensor(10)});
    return std::make_tuple();
  });
}

void block_forward_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    return block_forward(block_inputs_at(a), block_weights_at(a), block_config_at(a),
                         a[kBlockCount].toBool(), a[kBlockCount + 1].toBool());
  });
}

// main_grads and into are there in the accumulating op alone.
template <bool kAccumulate>
void block_backward_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    const Arguments block = a.slice(1);
    const Arguments rest = block.slice(kBlockCount);
    BlockConfig config = block_config_at(block);
    config.deterministic = rest[kBlockSavedCount].toBool();
    MainGradients main;
    if constexpr (kAccumulate)
      main = {rest[kBlockSavedCount + 2].toTensorVector(),
              rest[kBlockSavedCount + 3].toIntVector()};
    return block_backward(a[0].toTensor(), block_inputs_at(block), block_weights_at(block), config,
                          block_saved_at(rest),
                          need_at<kBlockWeights + 1>(rest[kBlockSavedCount + 1]), main);
  });
}

void ffn_forward_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    return std::make_tuple(blockwise_ffn_forward(
        a[0].toTensor(), ffn_weights_at(a), static_cast<Activation>(a[7].toInt()), a[8].toInt()));
  });
}

void ffn_backward_op(const c10::OperatorHandle& op, Stack* stack) {
  call(op, stack, [](Arguments a) {
    const Arguments ffn = a.slice(1);
    return ffn_backward(a[0].toTensor(), ffn[0].toTensor(), ffn_weights_at(ffn),
                        static_cast<Activation>(ffn[7].toInt()), ffn[8].toInt(),
                        need_at<7>(ffn[9]));
  });
}

// The ops have no derivative of their own: the public functions of the Python package hold it. An
// input that wants a gradient is refused here, so that none is ever lost without a word.
void refuse_tensor(const c10::OperatorHandle& op, const at::Tensor& t, const char* advice) {
  TORCH_CHECK(!(at::GradMode::is_enabled() && t.requires_grad()), op.schema().name(),
              ": an input "
              "requires grad, but the op has no derivative of its own. ",
              advice);
  TORCH_CHECK_NOT_IMPLEMENTED(!t.defined() || !t._fw_grad(/*level=*/0).defined(),
                              op.schema().name(),
                              ": flashbpt has no forward-mode derivative; use "
                              "torch.nn.functional.scaled_dot_product_attention under "
                              "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for it.");
}

template <const char* const* kAdvice>
void refuse_grad(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) refuse_tensor(op, value.toTensor(), *kAdvice);
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) refuse_tensor(op, t, *kAdvice);
    }
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Autograd must see that the tensors that an op writes have changed.
void bump_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) {
      const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
      if (value.isTensor())
        written.push_back(value.toTensor());
      else
        for (const at::Tensor& t : value.toTensorVector()) written.push_back(t);
    }
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const at::Tensor& t : written) torch::autograd::impl::bump_version(t);
}

const char* const kUsePublic =
    "Call flashbpt.attention, flashbpt.varlen_attention, flashbpt.merge_attention_states, "
    "flashbpt.transformer_block or flashbpt.blockwise_ffn, which are differentiable, or wrap the "
    "call in torch.no_grad().";
const char* const kNoPagedDerivative =
    "Attention over a cache is for inference: wrap the call in torch.no_grad(), or train through "
    "flashbpt.attention or flashbpt.varlen_attention.";
const char* const kNoDoubleBackward =
    "flashbpt has no double backward; use torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for it.";

const char* const kNoBlockDoubleBackward =
    "flashbpt's transformer block and FFN have no double backward; write the layer with torch's "
    "own functions for it.";

// CPU and CUDA share the host functions, which choose the kernel by device and capability.
void register_kernels(torch::Library& m) {
  m.impl("attention_forward", torch::CppFunction::makeFromBoxedFunction<&forward_op>());
  m.impl("attention_backward", torch::CppFunction::makeFromBoxedFunction<&backward_op>());
  m.impl("attention_backward_accumulate",
         torch::CppFunction::makeFromBoxedFunction<&backward_accumulate_op>());
  m.impl("dropout_mask", &dropout_mask);
  m.impl("draw_rng_state", &draw_rng_state);
  m.impl("merge_attention_states", &merge_attention_states);
  m.impl("check_cu_seqlens", &check_cu_seqlens);
  m.impl("paged_attention", torch::CppFunction::makeFromBoxedFunction<&paged_op>());
  m.impl("paged_attention_out", torch::CppFunction::makeFromBoxedFunction<&paged_out_op>());
  m.impl("append_paged_kv", torch::CppFunction::makeFromBoxedFunction<&append_op>());
  m.impl("blockwise_ffn_forward", torch::CppFunction::makeFromBoxedFunction<&ffn_forward_op>());
  m.impl("blockwise_ffn_backward", torch::CppFunction::makeFromBoxedFunction<&ffn_backward_op>());
  m.impl("transformer_block_forward",
         torch::CppFunction::makeFromBoxedFunction<&block_forward_op>());
  m.impl("transformer_block_backward",
         torch::CppFunction::makeFromBoxedFunction<&block_backward_op<false>>());
  m.impl("transformer_block_backward_accumulate",
         torch::CppFunction::makeFromBoxedFunction<&block_backward_op<true>>());
}

}  // namespace

TORCH_LIBRARY(flashbpt, m) {
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def(("attention_forward(Tensor q, Tensor k, Tensor v, " + kOptions +
         ") -> (Tensor out, Tensor lse, Tensor lse_lo, Tensor mask_tiles)")
            .c_str(),
        pure);
  m.def(("attention_backward(" + kSaved + kOptions +
         ", bool deterministic, bool[6] need) -> "
         "(Tensor dq, Tensor dk, Tensor dv, Tensor dmask, Tensor dsinks, Tensor dalibi)")
            .c_str(),
        pure);
  m.def(("attention_backward_accumulate(" + kSaved + kOptions +
         ", bool deterministic, "
         "bool[6] need, Tensor(a!) dk, Tensor(b!) dv) -> "
         "(Tensor dq, Tensor dmask, Tensor dsinks, Tensor dalibi)")
            .c_str(),
        pure);
  m.def(("attention_kernel(Tensor q, Tensor k, Tensor v, " + kOptions + ", bool backward) -> str")
            .c_str());
  m.def("dropout_mask(Tensor rng_state, float p, SymInt[] sizes, SymInt[] offsets) -> Tensor",
        pure);
  m.def("draw_rng_state(Tensor like, int increment) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.def("merge_attention_states(Tensor[] outs, Tensor[] lses) -> (Tensor out, Tensor lse)", pure);
  m.def("check_cu_seqlens(Tensor cu_seqlens, SymInt tokens, str name) -> Tensor");
  m.def(("paged_attention(" + kPaged + ") -> (Tensor out, Tensor lse)").c_str(), pure);
  m.def(("paged_attention_kernel(" + kPaged + ") -> str").c_str());
  m.def(("check_paged_attention(" + kPaged + ") -> ()").c_str());
  m.def(("paged_attention_out(" + kPaged + ", Tensor(a!) out) -> Tensor lse").c_str(), pure);
  m.def("check_slot_mapping(Tensor slot_mapping, SymInt slots) -> ()");
  m.def(
      "append_paged_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor? cos, Tensor? sin, Tensor? positions, bool interleaved, "
      "Tensor? key_scale, Tensor? value_scale) -> ()",
      pure);
  m.def(("blockwise_ffn_forward(" + kFfn + ") -> Tensor").c_str(), pure);
  m.def(("blockwise_ffn_backward(Tensor grad_out, " + kFfn +
         ", bool[7] need) -> (Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor b_gate, "
         "Tensor b_up, Tensor b_down)")
            .c_str(),
        pure);
  m.def(("transformer_block_forward(" + kBlock +
         ", bool keep, bool return_kv) -> (Tensor y, Tensor keys, Tensor values, " + kBlockSaved +
         ")")
            .c_str(),
        pure);
  m.def(("transformer_block_backward(Tensor grad_out, " + kBlock + ", " + kBlockSaved +
         ", bool deterministic, bool[22] need) -> " + kBlockGradients)
            .c_str(),
        pure);
  m.def(("transformer_block_backward_accumulate(Tensor grad_out, " + kBlock + ", " + kBlockSaved +
         ", bool deterministic, bool[22] need, Tensor(a!)[] main_grads, int[] into) -> " +
         kBlockGradients)
            .c_str(),
        pure);
}

TORCH_LIBRARY_IMPL(flashbpt, CPU, m) {
  register_kernels(m);
}

TORCH_LIBRARY_IMPL(flashbpt, CUDA, m) {
  register_kernels(m);
}

TORCH_LIBRARY_IMPL(flashbpt, CompositeExplicitAutograd, m) {
  m.impl("attention_kernel", torch::CppFunction::makeFromBoxedFunction<&kernel_op>());
  m.impl("paged_attention_kernel", torch::CppFunction::makeFromBoxedFunction<&paged_kernel_op>());
  m.impl("check_slot_mapping", &check_slot_mapping);
  m.impl("check_paged_attention", torch::CppFunction::makeFromBoxedFunction<&check_paged_op>());
}

TORCH_LIBRARY_IMPL(flashbpt, Autograd, m) {
  for (const char* op : {"paged_attention", "paged_attention_out", "append_paged_kv"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_grad<&kNoPagedDerivative>>());
  m.impl("attention_forward",
         torch::CppFunction::makeFromBoxedFunction<&refuse_grad<&kUsePublic>>());
  m.impl("attention_backward",
         torch::CppFunction::makeFromBoxedFunction<&refuse_grad<&kNoDoubleBackward>>());
  m.impl("attention_backward_accumulate",
         torch::CppFunction::makeFromBoxedFunction<&refuse_grad<&kNoDoubleBackward>>());
  for (const char* op :
       {"merge_attention_states", "blockwise_ffn_forward", "transformer_block_forward"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_grad<&kUsePublic>>());
  for (const char* op : {"blockwise_ffn_backward", "transformer_block_backward",
                         "transformer_block_backward_accumulate"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_grad<&kNoBlockDoubleBackward>>());
}

TORCH_LIBRARY_IMPL(flashbpt, ADInplaceOrView, m) {
  m.impl("paged_attention_out", torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
  m.impl("append_paged_kv", torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
  m.impl("attention_backward_accumulate",
         torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
  m.impl("transformer_block_backward_accumulate",
         torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
}

}  // namespace flashbpt
