// Keys in pages, for kernels that walk over the keys of one request in tiles.
#pragma once

#include "../attention/divisor.h"
#include "../paged_params.h"

namespace flashbpt::sm80 {

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

// Of shared memory, that say where the keys of two tiles lie: paged_tile.h.
constexpr int paged_tile_bytes(int block_k) {
  return 32 + 20 * block_k;
}

// The pages of a call.
struct PagedKeys {
  PageTableView table;
  Divisor page_size;
  int64_t k_page = 0, v_page = 0;  // strides from page to page, in bytes
  // Whether all rows are made of whole chunks, of which 32 bits count all there are.
  bool whole_chunks = false;
  PagedChunks k_chunks, v_chunks;
  int64_t few_rows = 0;  // requests with so many rows or fewer are another kernel's
};

// Keys of a request.
__device__ inline int paged_length(const PageTableView& table, int request) {
  if (table.seq_lens) return table.seq_lens.low(request);
  const int pages = table.indptr.low(request + 1) - table.indptr.low(request);
  return pages > 0
             ? (pages - 1) * static_cast<int>(table.page_size) + table.last_page_len.low(request)
             : 0;
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

}  // namespace flashbpt::sm80
