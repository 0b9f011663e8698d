// Keys in pages, for kernels that walk over the keys of one request in tiles.
#pragma once

#include "../attention/paged_keys.h"

namespace flashbpt::sm80 {

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

}  // namespace flashbpt::sm80
