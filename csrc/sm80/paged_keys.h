// Keys in pages, for kernels that walk over the keys of one request in tiles.
#pragma once

#include "../attention/divisor.h"
#include "../attention/page_table.h"

namespace flashbpt::sm80 {

// Where a key lies; page -1: nowhere.
struct PagedSlot {
  int page, token;
};

// The pages of a call.
struct PagedKeys {
  PageTableView table;
  Divisor page_size;
  int64_t k_page = 0, v_page = 0;  // strides from page to page, in elements
  int64_t few_rows = 0;            // requests with so many rows or fewer are another kernel's
};

// The slot of a key of the request whose entries begin at `begin`.
__device__ inline PagedSlot paged_slot(const PageTableView& table, const Divisor& page_size,
                                       int64_t begin, int key) {
  const uint32_t page = page_size.quotient(key);
  if (!table.slots)
    return {static_cast<int>(table.entries[begin + page]),
            static_cast<int>(key - page * page_size.value())};
  const uint32_t slot = static_cast<uint32_t>(table.entries[begin + key]);
  return {static_cast<int>(page_size.quotient(slot)), static_cast<int>(page_size.remainder(slot))};
}

}  // namespace flashbpt::sm80
