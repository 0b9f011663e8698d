// The Python module flashbpt._C. Importing it registers the ops (ops.cpp); what it offers itself is
// no tensor op: how the library was built, and which CUDA kernels are in it.
#include <string>

#include <pybind11/pybind11.h>

#include "attention_backends.h"

#ifdef FLASHBPT_WITH_CUDA
#include <cuda_runtime_api.h>

#include "sm80/merge_states/config.h"
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
py::dict config_dict(const sm80::MergeStatesConfig& c) {
  return py::dict("block_threads"_a = c.block_threads, "vector_bytes"_a = c.vector_bytes,
                  "states_in_flight"_a = c.states_in_flight, "min_blocks"_a = c.min_blocks,
                  "smem_bytes"_a = c.smem_bytes());
}
#endif

// One entry a row of the tables in the kernels' config.h.
py::list kernels() {
  py::list rows;
#ifdef FLASHBPT_WITH_CUDA
  for (const sm80::MergeStatesKernel& kernel : sm80::kMergeStatesKernels)
    rows.append(py::dict("name"_a = kernel.name, "backend"_a = "sm80",
                         "config"_a = config_dict(kernel.config)));
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
