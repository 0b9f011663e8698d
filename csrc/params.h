// Host -> kernel structs. Free of torch headers: kernels and the CPU backend read these alone.
#pragma once

#include <cstdint>

#include "attention/host_device.h"
#include "attention/kv_range.h"

namespace flashbpt {

// Of the device that a call runs on; the host reads it once.
struct DeviceLimits {
  int multiprocessors;
  int smem_bytes;    // most shared memory of one block (sharedMemPerBlockOptin)
  int64_t l2_bytes;  // L2 cache
};

enum class DataType : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16, kBool };

constexpr int element_bytes(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat64:
      return 8;
    case DataType::kFloat32:
      return 4;
    case DataType::kBFloat16:
    case DataType::kFloat16:
      return 2;
    case DataType::kBool:
      break;
  }
  return 1;
}

// A tensor seen as (batch, head, row, column). Strides count elements; 0 where a dimension is
// broadcast. Packed tensors have batch stride 0: their sequences follow each other along the rows.
struct TensorView {
  void* data = nullptr;
  DataType dtype = DataType::kFloat32;
  int64_t batch = 0;
  int64_t head = 0;
  int64_t row = 0;
  int64_t col = 0;

  FLASHBPT_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

struct AttentionParams {
  TensorView q;       // [batch, heads_q, len_q, dim]
  TensorView k;       // [batch, heads_kv, len_k, dim]
  TensorView v;       // [batch, heads_kv, len_k, dim_v]
  TensorView mask;    // [batch, heads_q, len_q, len_k] by strides; bool, fp32 or q's type
  TensorView out;     // [batch, heads_q, len_q, dim_v], column stride 1
  TensorView lse;     // [batch, heads_q, len_q], natural logarithm, accumulation type
  TensorView lse_lo;  // as lse: what lse lost to rounding; only with an additive mask
  TensorView sinks;   // [heads_q] along `head`, accumulation type
  TensorView alibi;   // [batch, heads_q] along `batch` and `head`, accumulation type

  int64_t batch = 0;
  int64_t heads_q = 0;
  int64_t heads_kv = 0;
  int64_t len_q = 0;  // packed: tokens in q
  int64_t len_k = 0;  // packed: tokens in k and v
  int64_t dim = 0;
  int64_t dim_v = 0;

  // Packed sequences: batch + 1 offsets into the tokens each; null when dense.
  const void* cu_seqlens_q = nullptr;
  const void* cu_seqlens_k = nullptr;
  bool cu_seqlens_int64 = false;

  double scale = 1.0;
  double softcap = 0.0;  // 0: none
  Band band;             // causal and window as limits around the diagonal
  int64_t diagonal = 0;  // dense only; packed sequences are aligned lower-right

  int64_t q_offset = 0;
  int64_t k_offset = 0;
  int64_t batch_offset = 0;
  int64_t head_offset = 0;
  int64_t total_heads = 0;

  const int64_t* rng_state = nullptr;  // [2]: seed, offset
  uint64_t dropout_threshold = 0;      // a key stays where its word >= threshold; 0: no dropout
  double dropout_scale = 1.0;          // 1 / (1 - p)

  FLASHBPT_HOST_DEVICE int64_t group() const { return heads_kv > 0 ? heads_q / heads_kv : 1; }
  FLASHBPT_HOST_DEVICE bool packed() const { return cu_seqlens_q != nullptr; }
  FLASHBPT_HOST_DEVICE bool boolean_mask() const { return mask && mask.dtype == DataType::kBool; }
  // T >= 2^32 drops every key: outputs and gradients are zero, LSE as usual.
  FLASHBPT_HOST_DEVICE bool drops_all() const { return dropout_threshold >= (uint64_t{1} << 32); }
};

struct AttentionBackwardParams : AttentionParams {
  TensorView grad_out;  // [batch, heads_q, len_q, dim_v], any strides
  TensorView grad_lse;  // as lse, any strides; null: no gradient through LSE
  // Null where the gradient is not asked for.
  TensorView dq;  // [batch, heads_q, len_q, dim]
  // In the accumulation type and added into; sm80 writes them in q's type where it does not add.
  TensorView dk;      // [partials, batch, heads_kv, len_k, dim]
  TensorView dv;      // [partials, batch, heads_kv, len_k, dim_v]
  TensorView dmask;   // mask's own shape by strides, accumulation type, added into
  TensorView dsinks;  // [partials, batch, heads_q] along `row`, `batch`, `head`; added into
  TensorView dalibi;  // as dsinks
  // dsinks and dalibi hold copies for their blocks to own. On the CPU so do dk and dv, `partials`
  // of each: copy i takes the query tiles i, i + partials, ..., so that nobody shares an
  // accumulator and the sum over copies has one order.
  int64_t partials = 1;
  int64_t dk_partial_stride = 0;
  int64_t dv_partial_stride = 0;
};

}  // namespace flashbpt
