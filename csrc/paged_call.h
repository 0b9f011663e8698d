// One call over paged caches: its arguments checked once, as params for the kernels.
#pragma once

#include "check.h"
#include "paged.h"

namespace flashbpt {

inline bool is_fp8(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat8_e4m3fn || t.scalar_type() == at::kFloat8_e5m2;
}

// [pages, page_size, heads, width] of query's type or fp8, columns side by side.
CacheView cache_view(const char* name, const at::Tensor& cache, const at::Tensor& query,
                     const std::optional<at::Tensor>& scale);

// A vector of int32 or int64, any stride.
IntegersView integers_view(const char* name, const at::Tensor& t, const at::Tensor& query,
                           int64_t size);

class PagedCall {
 public:
  // Checks everything that does not need device memory; throws in a sentence.
  PagedCall(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
            const PageTable& table, const PagedOptions& options);

  at::Tensor empty_out() const;
  // Checks `out` and shows it and `lse` to the kernels.
  void set_results(const at::Tensor& out, const at::Tensor& lse);

  PagedParams params;
  PageTable table;
  PagedOptions options;
  at::Tensor q, k_cache, v_cache;
  at::Tensor sinks, slopes, tree;  // as the kernels read them; undefined where not given

 private:
  void check_tensors() const;
  void set_table();
  void set_terms();
};

}  // namespace flashbpt
