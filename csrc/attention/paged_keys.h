// Keys in pages as kernels read them: which slot of a cache holds a key of a request.
#pragma once

#include "../paged_params.h"
#include "divisor.h"
#include "sequence.h"

namespace flashbpt {

// Where a key lies; page -1: nowhere.
struct PagedSlot {
  int page, token;
};

// Strides of a cache in chunks of 16 bytes.
struct PagedChunks {
  uint32_t page, token;

  // From slot 0 of the cache.
  FLASHBPT_HOST_DEVICE uint32_t at(PagedSlot slot) const {
    return slot.page * page + slot.token * token;
  }
};

// Whether 32 bits count the chunks of a cache: they do up to 64 GB.
inline bool chunks_of(const CacheView& cache, int64_t page_size, int64_t heads_kv, int64_t width,
                      int element_bytes, PagedChunks& chunks) {
  const int64_t last = (cache.pages - 1) * cache.page + (page_size - 1) * cache.token +
                       (heads_kv - 1) * cache.head + width;
  chunks.page = static_cast<uint32_t>(cache.page * element_bytes / 16);
  chunks.token = static_cast<uint32_t>(cache.token * element_bytes / 16);
  return last * element_bytes / 16 < UINT32_MAX;
}

// The pages of a call.
struct KeyPages {
  PageTableView table;
  Divisor page_size;
  PagedChunks k_chunks, v_chunks;  // where rows are made of whole chunks, which 32 bits count
  int64_t few_rows = 0;            // requests with so many rows or fewer are another kernel's
};

// Fills `pages`; false where 32 bits do not count all chunks. Caches of 16-bit elements.
inline bool set_pages(const PagedParams& p, int64_t few_rows, KeyPages& pages) {
  pages.table = p.table;
  pages.page_size = Divisor(p.table.page_size);
  pages.few_rows = few_rows;
  const bool k = chunks_of(p.k, p.table.page_size, p.heads_kv, p.dim, 2, pages.k_chunks);
  const bool v = chunks_of(p.v, p.table.page_size, p.heads_kv, p.dim_v, 2, pages.v_chunks);
  return k && v;
}

// Keys of a request.
__device__ inline int paged_length(const PageTableView& table, int request) {
  if (table.seq_lens) return table.seq_lens.low(request);
  const int pages = table.indptr.low(request + 1) - table.indptr.low(request);
  return pages > 0
             ? (pages - 1) * static_cast<int>(table.page_size) + table.last_page_len.low(request)
             : 0;
}

// A request among packed queries: its keys are those of the page table, and end with its rows' own.
__device__ inline Sequence paged_sequence(const KeyPages& pages, Sequence seq) {
  seq.k_begin = 0;
  seq.len_k = paged_length(pages.table, static_cast<int>(seq.batch));
  seq.shift = seq.len_k - seq.len_q;
  return seq;
}

// A request's entries in the page table.
__device__ inline IntegersView paged_entries(const PageTableView& table, int request) {
  const int64_t begin = table.indptr
                            ? table.indptr.low(request)
                            : (table.rows ? table.rows.low(request) : request) * table.row_stride;
  return {static_cast<const char*>(table.entries.data) + begin * table.entries.stride,
          table.entries.int64, table.entries.stride};
}

// Which of its request's entries a key has, and the slot that the entry means.
__device__ inline uint32_t paged_entry(const PageTableView& table, const Divisor& page_size,
                                       int key) {
  return table.slots ? key : page_size.quotient(key);
}
__device__ inline PagedSlot paged_slot(const PageTableView& table, const Divisor& page_size,
                                       uint32_t entry, int key) {
  if (!table.slots) return {static_cast<int>(entry), static_cast<int>(page_size.remainder(key))};
  return {static_cast<int>(page_size.quotient(entry)),
          static_cast<int>(page_size.remainder(entry))};
}

// The call as attention over packed queries; pages stand for batch elements of k and v, and
// lengths of keys come from the page table.
inline AttentionParams attention_over_pages(const PagedParams& paged) {
  AttentionParams p;
  p.q = paged.q, p.out = paged.out, p.lse = paged.lse;
  p.sinks = paged.sinks, p.alibi = paged.alibi;
  const auto pages = [&](const CacheView& cache) {
    return TensorView{cache.data, paged.q.dtype, cache.page, cache.head, cache.token, 1};
  };
  p.k = pages(paged.k), p.v = pages(paged.v);
  p.batch = paged.batch, p.heads_q = paged.heads_q, p.heads_kv = paged.heads_kv;
  p.len_q = paged.tokens;
  p.dim = paged.dim, p.dim_v = paged.dim_v;
  p.cu_seqlens_q = p.cu_seqlens_k = paged.cu_seqlens_q.data;
  p.cu_seqlens_int64 = paged.cu_seqlens_q.int64;
  p.scale = paged.scale, p.softcap = paged.softcap, p.band = paged.band;
  p.total_heads = p.heads_q;
  return p;
}

}  // namespace flashbpt
