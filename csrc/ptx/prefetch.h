// Lines of global memory brought near before they are read (PTX ISA 9.7.9.15, prefetch).
#pragma once

namespace flashbpt::ptx {

__device__ inline void prefetch_l1(const void* gmem) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(gmem));
}

}  // namespace flashbpt::ptx
