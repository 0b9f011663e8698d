// Order between the grids of a stream (PTX ISA 9.7.13, griddepcontrol).
#pragma once

namespace flashbpt::ptx {

// Lets the blocks of the stream's next grid take free multiprocessors once every block of this one
// has started.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the earlier grids are complete and what they wrote is visible.
__device__ inline void wait_for_earlier_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// First in every kernel: its launch may overlap the end of the kernel before it. Compiled for less
// than sm_90 it is nothing, and launch_kernel.h launches in order.
__device__ inline void follow_earlier_grids() {
  launch_dependents();
  wait_for_earlier_grids();
}

}  // namespace flashbpt::ptx
