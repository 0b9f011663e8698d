#pragma once

#include <cuda_runtime_api.h>

#include "../attn_params.h"
#include "../paged_keys.h"
#include "schedule.h"

namespace flashbpt::sm80 {

constexpr int64_t kPagedBarriers = 3 * kMostBlocks;

struct PagedDecodeParams : PagedParams {
  size_t row = 0;  // of kPagedDecodeKernels
  PagedSchedule schedule;
  // Partial states in fp32, 2 blocks() of [tile_rows, partial_width()] and [tile_rows].
  float* partial_out = nullptr;
  float* partial_lse = nullptr;
  int32_t* barriers = nullptr;                   // [kPagedBarriers], see parts.h
  int access_q = 0, access_k = 0, access_v = 0;  // bytes that rows are cut into, at most 16
  bool out_vectors = false;                      // whether four columns of `out` are one vector
  // Whether the rows of both caches are cut into chunks, of which 32 bits count all there are.
  bool whole_chunks = false;
  PagedChunks k_chunks, v_chunks;

  // Columns of a partial row: a multiple of four, and not 0, since its LSE goes with the first
  // four.
  FLASHBPT_HOST_DEVICE int partial_width() const {
    return dim_v > 4 ? (static_cast<int>(dim_v) + 3) / 4 * 4 : 4;
  }
  // At least as many as there are units, of which the kernel counts kMostUnits: by the size of the
  // page table, since lengths are not known here.
  int64_t most_units() const;
  // Bytes that the partial states take.
  int64_t workspace_bytes() const;
  void set_workspace(void* workspace);
};

// Rows of a request up to which this kernel is the one to take: beyond a few tiles' products bind,
// not memory.
inline int64_t paged_decode_rows(const PagedParams& p) {
  constexpr int64_t kTileRows = 64;
  return p.group() < kTileRows ? kTileRows / p.group() : 1;
}

// Fills the schedule; then the workspace and the barriers are to be set, and most_rows where
// another kernel takes the rest.
void plan_paged_decode(PagedDecodeParams& p, const DeviceLimits& device);
const char* paged_decode_kernel(const PagedParams& p, const DeviceLimits& device);
void launch_paged_decode(const PagedDecodeParams& p, cudaStream_t stream);

}  // namespace flashbpt::sm80
