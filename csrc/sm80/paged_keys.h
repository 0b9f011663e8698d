// Keys in pages, for kernels that walk over the keys of one request in tiles.
#pragma once

#include "../attention/paged_keys.h"

namespace flashbpt::sm80 {

// Of shared memory, that say where the keys of two tiles lie: paged_tile.h.
constexpr int paged_tile_bytes(int block_k) {
  return 32 + 20 * block_k;
}

// The pages of a call, whatever their rows are made of.
struct PagedKeys : KeyPages {
  int64_t k_page = 0, v_page = 0;  // strides from page to page, in bytes
  bool whole_chunks = false;
};

}  // namespace flashbpt::sm80
