// Host side of the sm80 kernels over paged caches: params, partial states, launches.
#include "paged_backends.h"

#include "device_limits.h"

#ifdef FLASHBPT_WITH_CUDA
#include <algorithm>

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "sm80/append_kv/launch.h"
#include "sm80/paged_decode/launch.h"
#include "sm80/paged_prefill/launch.h"
#include "split_states.h"
#include "stream_words.h"
#endif

namespace flashbpt {

#ifdef FLASHBPT_WITH_CUDA

namespace {

// Rows with unit columns; `kept` owns them where they are a copy.
sm80::AppendRows append_rows(const char* name, const at::Tensor& rows, const at::Tensor& cache,
                             const std::optional<at::Tensor>& scale, at::Tensor& kept) {
  kept = has_unit_columns(rows) ? rows : rows.contiguous();
  sm80::AppendRows a;
  a.rows = {kept.data_ptr(), data_type(kept.scalar_type()), 0, kept.stride(1), kept.stride(0), 1};
  a.cache = cache_view(name, cache, rows, scale);
  a.width = static_cast<int>(rows.size(2));
  // Vectors of 8 elements: whether every row begins at a multiple of them.
  const auto aligned = [](const at::Tensor& t, std::initializer_list<int64_t> strides) {
    const int64_t element = t.element_size();
    int64_t bits = reinterpret_cast<int64_t>(t.data_ptr());
    for (int64_t stride : strides) bits |= stride * element;
    return common_access(bits) >= std::min<int64_t>(16, 8 * element);
  };
  a.vectorised = aligned(kept, {kept.stride(0), kept.stride(1)}) &&
                 aligned(cache, {cache.stride(0), cache.stride(1), cache.stride(2)});
  return a;
}

bool takes_prefill(const PagedParams& p, const DeviceLimits& device) {
  return has_prefill(p) && sm80::paged_prefill_serves(p, device);
}

// Rows of requests that decoding takes hold nothing of use then: it goes after.
void launch_prefill(const PagedCall& call, const DeviceLimits& device, c10::cuda::CUDAStream stream,
                    const at::Tensor& out, const at::Tensor& lse) {
  const SplitStates states(
      sm80::paged_prefill_splits(call.params, device), out, false,
      [](const at::Tensor& out) {
        return TensorView{out.data_ptr(), DataType::kFloat32, 0, out.stride(1), out.stride(0), 1};
      },
      [](const at::Tensor& lse) {
        return TensorView{lse.data_ptr(), DataType::kFloat32, 0, lse.stride(1), lse.stride(0), 0};
      });
  sm80::launch_paged_prefill(call.params, states.params, device, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  if (states.params.count == 1) return;
  const auto [merged, merged_lse] = states.merged();
  out.copy_(merged);
  lse.copy_(merged_lse);
}

}  // namespace

bool has_prefill(const PagedParams& p) {
  const int64_t most = p.max_len_q > 0 ? p.max_len_q : p.tokens > p.batch ? p.tokens : 1;
  return most > sm80::paged_decode_rows(p);
}

int64_t paged_decode_rows(const PagedParams& p) {
  return sm80::paged_decode_rows(p);
}

const char* paged_kernel_sm80(const PagedCall& call) {
  const DeviceLimits device = device_limits(call.q);
  return takes_prefill(call.params, device) ? sm80::paged_prefill_kernel(call.params, device)
                                            : sm80::paged_decode_kernel(call.params, device);
}

const char* refuse_paged_sm80(const PagedCall& call) {
  if (call.q.scalar_type() == at::kDouble) return "it takes fp16, bf16 and fp32";
  if (std::max(call.params.dim, call.params.dim_v) > 256) return "it takes head dims up to 256";
  if (call.params.k.type != CacheType::kSame && call.q.scalar_type() == at::kFloat)
    return "it takes fp8 caches with queries of fp16 and bf16";
  if (at::cuda::getDeviceProperties(call.q.get_device())->major < 8)
    return "the GPU is older than compute capability 8.0";
  return nullptr;
}

void paged_attention_sm80(const PagedCall& call, const at::Tensor& out, const at::Tensor& lse) {
  const c10::cuda::CUDAGuard guard(call.q.device());
  const PagedParams& params = call.params;
  if (params.tokens == 0 || params.heads_q == 0) return;  // no element to compute
  const DeviceLimits device = device_limits(call.q);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const bool prefill = takes_prefill(params, device);
  if (prefill) launch_prefill(call, device, stream, out, lse);
  paged_decode_sm80(call, prefill);
}

void paged_decode_sm80(const PagedCall& call, bool prefilled) {
  const PagedParams& params = call.params;
  const DeviceLimits device = device_limits(call.q);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  sm80::PagedDecodeParams p{params};
  sm80::plan_paged_decode(p, device);
  if (prefilled) p.schedule.most_rows = static_cast<int>(sm80::paged_decode_rows(params));
  TORCH_CHECK(p.most_units() <= sm80::kMostUnits, "flashbpt: ", params.tokens,
              " rows and a page table of ", params.table.most_keys, " keys a request make up to ",
              p.most_units(), " units of work; a call takes ", sm80::kMostUnits);
  const at::Tensor workspace = at::empty({p.workspace_bytes()}, call.q.options().dtype(at::kByte));
  p.set_workspace(workspace.data_ptr());
  static_assert(sm80::kPagedBarriers <= StreamWords::kBarriers);
  p.barriers = stream_words(stream).barriers;
  sm80::launch_paged_decode(p, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void append_paged_kv_sm80(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache,
                          const at::Tensor& v_cache, const at::Tensor& slot_mapping,
                          const AppendOptions& options) {
  const c10::cuda::CUDAGuard guard(key.device());
  TORCH_CHECK_NOT_IMPLEMENTED(key.scalar_type() != at::kDouble,
                              "flashbpt: on a GPU append_paged_kv takes float32, bfloat16 and "
                              "float16, got float64");
  sm80::AppendKvParams p;
  at::Tensor keys, values, cos, sin;
  p.key = append_rows("key_cache", key, k_cache, options.key_scale, keys);
  p.value = append_rows("value_cache", value, v_cache, options.value_scale, values);
  p.slots = integers_view("slot_mapping", slot_mapping, key, key.size(0));
  if (options.cos) {
    cos = options.cos->to(at::kFloat).contiguous();
    sin = options.sin->to(at::kFloat).contiguous();
    p.cos = cos.data_ptr<float>();
    p.sin = sin.data_ptr<float>();
    p.half = static_cast<int>(cos.size(1));
    p.interleaved = options.interleaved;
    if (options.positions)
      p.positions = integers_view("positions", *options.positions, key, key.size(0));
  }
  p.tokens = key.size(0);
  p.heads = static_cast<int>(key.size(1));
  p.page_size = k_cache.size(1);
  sm80::launch_append_kv(p, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

#else

void append_paged_kv_sm80(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          const at::Tensor&, const at::Tensor&, const AppendOptions&) {}

const char* refuse_paged_sm80(const PagedCall&) {
  return "this build has no CUDA part";
}

const char* paged_kernel_sm80(const PagedCall&) {
  return "";
}
void paged_attention_sm80(const PagedCall&, const at::Tensor&, const at::Tensor&) {}
bool has_prefill(const PagedParams&) {
  return false;
}
int64_t paged_decode_rows(const PagedParams&) {
  return 0;
}
void paged_decode_sm80(const PagedCall&, bool) {}

#endif

}  // namespace flashbpt
