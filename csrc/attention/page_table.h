// Where the keys of a request lie in a paged cache: block tables, token tables and CSR alike.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flashbpt {

// A vector of whole numbers of either width in memory.
struct IntegersView {
  const void* data = nullptr;
  bool int64 = false;
  uint32_t stride = 4;  // bytes from one to the next

  FLASHBPT_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  FLASHBPT_HOST_DEVICE int64_t operator[](int64_t i) const {
    const char* const at = static_cast<const char*>(data) + i * stride;
    return int64 ? *reinterpret_cast<const int64_t*>(at) : *reinterpret_cast<const int32_t*>(at);
  }
  // The same of a vector within 2 GB and of numbers that 32 bits hold, in few instructions: the low
  // half.
  FLASHBPT_HOST_DEVICE int32_t low(uint32_t i) const {
    return *reinterpret_cast<const int32_t*>(static_cast<const char*>(data) + i * stride);
  }
};

// Entries of a request are pages of `page_size` slots; or, in a token table, slots themselves.
//
//   block table   entries [batch, max_pages], row_stride                (PagedAttention)
//   token table   entries [rows, max_tokens], row_stride, rows [batch]  (SGLang: req_to_token)
//   CSR           entries [pages in use], indptr [batch + 1]            (FlashInfer)
//
// Entries past the used ones are never read. Kernels have functions of their own: paged_keys.h.
struct PageTableView {
  IntegersView entries;
  int64_t row_stride = 0;
  IntegersView rows;    // row of a request; none: the request itself
  IntegersView indptr;  // first entry of a request, CSR alone
  bool slots = false;
  int64_t page_size = 1;
  IntegersView seq_lens;       // [batch]: keys of a request, its new rows' own included
  IntegersView last_page_len;  // [batch], CSR without seq_lens
  int64_t most_keys = 0;       // that a request may have, by the size of the table

  // Keys of a request.
  int64_t length(int64_t request) const {
    if (seq_lens) return seq_lens[request];
    const int64_t pages = indptr[request + 1] - indptr[request];
    return pages > 0 ? (pages - 1) * page_size + last_page_len[request] : 0;
  }
  // Index of a request's first entry.
  int64_t begin(int64_t request) const {
    if (indptr) return indptr[request];
    return (rows ? rows[request] : request) * row_stride;
  }
  // Of the slot that holds key `position` of the request whose entries begin at `begin`.
  int64_t slot(int64_t begin, int64_t position) const {
    if (slots) return entries[begin + position];
    return entries[begin + position / page_size] * page_size + position % page_size;
  }
};

}  // namespace flashbpt
