#include "launch.h"

#include <algorithm>
#include <iterator>

#include "config.h"
#include "launch_kernels.h"

namespace flashbpt::sm80 {
namespace {

// The narrowest tile that holds a head, and tall where a request's rows fill more than a short one;
// of several the first that fits the device.
size_t choose_row(const PagedParams& p, const DeviceLimits& device) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  const int64_t tokens =
      p.max_len_q > 0 ? p.max_len_q : ceil_div(p.tokens, std::max<int64_t>(p.batch, 1));
  const int64_t rows = tokens * p.group();
  size_t best = std::size(kPagedDecodeKernels);
  for (size_t i = 0; i < std::size(kPagedDecodeKernels); ++i) {
    const PagedDecodeKernel& k = kPagedDecodeKernels[i];
    const PagedDecodeConfig& c = k.config;
    const bool fp8 = k.cache != CacheType::kSame;
    if (k.cache != p.k.type || (!fp8 && k.dtype != p.q.dtype) || c.head_dim < dim ||
        c.smem_bytes() > device.smem_bytes)
      continue;
    if (best == std::size(kPagedDecodeKernels)) {
      best = i;
      continue;
    }
    const PagedDecodeConfig& now = kPagedDecodeKernels[best].config;
    const bool taller = c.rows > now.rows && rows > now.rows;
    if (c.head_dim < now.head_dim || (c.head_dim == now.head_dim && taller)) best = i;
  }
  return best;
}

// Bytes, at most 16, of which where every row begins and ends is a multiple.
int access_of(const void* data, std::initializer_list<int64_t> strides, int64_t width,
              int element_bytes) {
  int64_t bits = reinterpret_cast<int64_t>(data) | width * element_bytes;
  for (int64_t stride : strides) bits |= stride * element_bytes;
  return common_access(bits);
}

}  // namespace

const char* paged_decode_kernel(const PagedParams& p, const DeviceLimits& device) {
  return kPagedDecodeKernels[choose_row(p, device)].name;
}

int64_t PagedDecodeParams::most_units() const {
  const PagedDecodeConfig& c = kPagedDecodeKernels[row].config;
  const int64_t request_rows = std::min<int64_t>(tokens, schedule.most_rows) * group();
  const int64_t tiles =
      std::min(tokens * group() / c.rows + batch, batch * ceil_div(request_rows, c.rows));
  const int64_t key_units = ceil_div(table.most_keys, c.unit_keys());
  const int64_t units = tiles * (std::max<int64_t>(key_units, 1) + item_extra(c.rows));
  if (!table.indptr) return units;
  // The entries of CSR are those of all requests.
  return std::min(units,
                  ceil_div(request_rows, c.rows) * (key_units + batch * (1 + item_extra(c.rows))));
}

int64_t PagedDecodeParams::workspace_bytes() const {
  if (schedule.teams.value() == 1) return 0;  // nothing is split
  const int64_t rows = int64_t{2} * schedule.blocks() * schedule.tile_rows;
  return rows * (partial_width() + 1) * 4;
}

void PagedDecodeParams::set_workspace(void* workspace) {
  const int64_t rows = int64_t{2} * schedule.blocks() * schedule.tile_rows;
  partial_out = static_cast<float*>(workspace);
  partial_lse = partial_out + rows * partial_width();
}

void plan_paged_decode(PagedDecodeParams& p, const DeviceLimits& device) {
  p.row = choose_row(p, device);
  const PagedDecodeConfig& c = kPagedDecodeKernels[p.row].config;
  const int64_t blocks = std::min<int64_t>(device.multiprocessors * c.min_blocks, kMostBlocks);
  p.schedule = {c.rows,
                INT32_MAX,
                Divisor(std::max<int64_t>(blocks / std::max<int64_t>(p.heads_kv, 1), 1)),
                Divisor(p.heads_kv),
                Divisor(p.group()),
                Divisor(p.table.page_size)};
  p.access_q = access_of(p.q.data, {p.q.row, p.q.head}, p.dim, element_bytes(p.q.dtype));
  p.access_k = access_of(p.k.data, {p.k.page, p.k.token, p.k.head}, p.dim, c.cache_bytes);
  p.access_v = access_of(p.v.data, {p.v.page, p.v.token, p.v.head}, p.dim_v, c.cache_bytes);
  const int64_t out_bytes = element_bytes(p.out.dtype);
  p.out_vectors = access_of(p.out.data, {p.out.row, p.out.head}, 4, out_bytes) >= 4 * out_bytes;
  const int64_t size = p.table.page_size;
  p.whole_chunks = p.access_k == 16 && p.access_v == 16 &&
                   chunks_of(p.k, size, p.heads_kv, p.dim, c.cache_bytes, p.k_chunks) &&
                   chunks_of(p.v, size, p.heads_kv, p.dim_v, c.cache_bytes, p.v_chunks);
}

void launch_paged_decode(const PagedDecodeParams& p, cudaStream_t stream) {
  const PagedDecodeKernel& kernel = kPagedDecodeKernels[p.row];
  if (kernel.cache == CacheType::kFp8E4m3) return launch_paged_decode_e4m3(p, stream);
  if (kernel.cache == CacheType::kFp8E5m2) return launch_paged_decode_e5m2(p, stream);
  if (kernel.dtype == DataType::kBFloat16) return launch_paged_decode_bf16(p, stream);
  if (kernel.dtype == DataType::kFloat16) return launch_paged_decode_fp16(p, stream);
  launch_paged_decode_fp32(p, stream);
}

}  // namespace flashbpt::sm80
