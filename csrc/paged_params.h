// Host -> kernel structs of attention over paged caches, CPU and CUDA alike. Free of torch headers.
#pragma once

#include "attention/page_table.h"
#include "params.h"

namespace flashbpt {

// Elements of a cache.
enum class CacheType : int32_t { kSame, kFp8E4m3, kFp8E5m2 };  // kSame: query's type

// One cache, [pages, page_size, heads_kv, width]; strides count elements, columns are neighbours.
struct CacheView {
  void* data = nullptr;
  CacheType type = CacheType::kSame;
  int64_t pages = 0;
  int64_t page = 0;
  int64_t token = 0;
  int64_t head = 0;
  const float* scale = nullptr;  // what a stored element stands for, in units; null: 1
  int64_t scale_stride = 0;      // 1: one a kv head
};

struct PagedParams {
  TensorView q;    // [tokens, heads_q, dim] along `row` and `head`
  TensorView out;  // [tokens, heads_q, dim_v]
  TensorView lse;  // [tokens, heads_q], fp32
  CacheView k;     // width: dim
  CacheView v;     // width: dim_v
  PageTableView table;
  IntegersView cu_seqlens_q;  // [batch + 1]; none: one row a request

  int64_t batch = 0;
  int64_t tokens = 0;
  int64_t heads_q = 0;
  int64_t heads_kv = 0;
  int64_t dim = 0;
  int64_t dim_v = 0;
  int64_t max_len_q = 0;  // rows of a request at most; 0: not known

  double scale = 1.0;
  double softcap = 0.0;
  Band band;                      // around the diagonal that ends at a request's last key
  TensorView sinks;               // [heads_q] along `head`, fp32
  TensorView alibi;               // [batch, heads_q], fp32
  const uint8_t* tree = nullptr;  // the requests' [rows, rows], one after the other

  FLASHBPT_HOST_DEVICE int64_t group() const { return heads_kv > 0 ? heads_q / heads_kv : 1; }
};

}  // namespace flashbpt
