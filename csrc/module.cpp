// The Python module flashbpt._C. Importing it registers the ops (ops.cpp); what it offers itself is
// no tensor op: how the library was built, and which CUDA kernels are in it.
#include <string>

#include <pybind11/pybind11.h>

#include "device_limits.h"

#ifdef FLASHBPT_WITH_CUDA
#include <cuda_runtime_api.h>

#include "sm80/append_kv/config.h"
#include "sm80/attn_bwd/config.h"
#include "sm80/attn_bwd_finish/config.h"
#include "sm80/attn_bwd_prepare/config.h"
#include "sm80/attn_bwd_terms/config.h"
#include "sm80/attn_fwd/config.h"
#include "sm80/mask_tiles/config.h"
#include "sm80/merge_states/config.h"
#include "sm80/paged_decode/config.h"
#include "sm80/paged_prefill/config.h"
#include "sm90/attn_fwd/config.h"
#endif

namespace py = pybind11;
using namespace pybind11::literals;

namespace flashbpt {
namespace {

py::dict build_info() {
  py::object cuda = py::none();
  std::string archs;
#ifdef FLASHBPT_WITH_CUDA
  cuda = py::str(std::to_string(CUDART_VERSION / 1000) + "." +
                 std::to_string(CUDART_VERSION % 1000 / 10));
  archs = FLASHBPT_CUDA_ARCHS;
#endif
  return py::dict("version"_a = FLASHBPT_VERSION, "torch"_a = FLASHBPT_TORCH_VERSION,
                  "cuda"_a = cuda, "archs"_a = py::str(archs).attr("split")(),
                  "compiler"_a = "g++ " __VERSION__);
}

#ifdef FLASHBPT_WITH_CUDA
// What the tiles of the attention kernels have in common.
template <typename Config>
py::dict config_dict(const Config& c) {
  return py::dict("element_bytes"_a = c.element_bytes, "head_dim"_a = c.head_dim,
                  "block_q"_a = c.block_q, "block_k"_a = c.block_k, "warps"_a = c.warps,
                  "min_blocks"_a = c.min_blocks, "smem_bytes"_a = c.smem_bytes(0));
}

py::dict config_dict(const sm80::MaskTilesConfig& c) {
  return py::dict("block_tiles"_a = c.block_tiles, "thread_rows"_a = c.thread_rows,
                  "min_blocks"_a = c.min_blocks, "smem_bytes"_a = c.smem_bytes());
}

py::dict config_dict(const sm80::AttnBwdPrepareConfig& c) {
  return py::dict("block_threads"_a = c.block_threads, "vector_bytes"_a = c.vector_bytes,
                  "thread_vectors"_a = c.thread_vectors, "min_lanes"_a = c.min_lanes,
                  "min_blocks"_a = c.min_blocks, "smem_bytes"_a = c.smem_bytes());
}

py::dict config_dict(const sm80::AttnBwdFinishConfig& c) {
  return py::dict("block_threads"_a = c.block_threads, "vector_bytes"_a = c.vector_bytes,
                  "min_blocks"_a = c.min_blocks, "smem_bytes"_a = c.smem_bytes());
}

py::dict config_dict(const sm80::MergeStatesConfig& c) {
  return py::dict("block_threads"_a = c.block_threads, "vector_bytes"_a = c.vector_bytes,
                  "states_in_flight"_a = c.states_in_flight, "min_blocks"_a = c.min_blocks,
                  "smem_bytes"_a = c.smem_bytes());
}

py::dict config_dict(const sm80::PagedDecodeConfig& c) {
  return py::dict("element_bytes"_a = c.element_bytes, "cache_bytes"_a = c.cache_bytes,
                  "head_dim"_a = c.head_dim, "rows"_a = c.rows, "block_k"_a = c.block_k,
                  "warps"_a = c.warps, "stages"_a = c.stages, "min_blocks"_a = c.min_blocks,
                  "smem_bytes"_a = c.smem_bytes());
}

py::dict config_dict(const sm80::AppendKvConfig& c) {
  return py::dict("block_threads"_a = c.block_threads, "width"_a = c.width);
}

py::dict config_dict(const sm90::AttnFwdConfig& c) {
  return py::dict("element_bytes"_a = 2, "head_dim"_a = c.head_dim, "dim_v"_a = c.dim_v,
                  "block_q"_a = c.block_q(), "block_k"_a = c.block_k, "warpgroups"_a = c.warpgroups,
                  "stages"_a = c.stages, "smem_bytes"_a = c.smem_bytes());
}
#endif

// One entry a row of the tables in the kernels' config.h.
py::list kernels() {
  py::list rows;
#ifdef FLASHBPT_WITH_CUDA
  const auto add = [&](const char* name, const auto& config, const char* backend = "sm80") {
    rows.append(py::dict("name"_a = name, "backend"_a = backend, "config"_a = config_dict(config)));
  };
  for (const auto& kernel : sm90::kAttnFwdKernels) add(kernel.name, kernel.config, "sm90");
  for (const auto& kernel : sm80::kAttnFwdKernels) add(kernel.name, kernel.config);
  add("attn_bwd_prepare", sm80::kAttnBwdPrepareConfig);
  for (const auto& kernel : sm80::kAttnBwdKernels) add(kernel.name, kernel.config);
  add("attn_bwd_finish", sm80::kAttnBwdFinishConfig);
  for (const auto& kernel : sm80::kAttnBwdTermsKernels) add(kernel.name, kernel.config);
  add("mask_tiles", sm80::kMaskTilesConfig);
  for (const auto& kernel : sm80::kMergeStatesKernels) add(kernel.name, kernel.config);
  for (const auto& kernel : sm80::kPagedDecodeKernels) add(kernel.name, kernel.config);
  for (const auto& kernel : sm80::kPagedPrefillKernels) add(kernel.name, kernel.config);
  add("append_kv", sm80::kAppendKvConfig);
#endif
  return rows;
}

}  // namespace
}  // namespace flashbpt

PYBIND11_MODULE(_C, m) {
  m.doc() = "Registers flashbpt's ops with torch; tells how it was built.";
  m.def("build_info", &flashbpt::build_info,
        "Versions of flashbpt, torch, CUDA (None in a CPU build), architectures and compiler.");
  m.def(
      "kernels", &flashbpt::kernels,
      "The CUDA kernels of this build: a list of dicts with name, backend and tile configuration.");
  m.def("limit_shared_memory", &flashbpt::limit_shared_memory, "bytes"_a,
        "For tests: choose kernels as on a GPU with so much shared memory a block; 0: no limit.");
}
