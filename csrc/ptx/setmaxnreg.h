// Registers that a warpgroup hands to the others (PTX ISA 9.7.20.5, setmaxnreg). All warps of the
// warpgroup call it; counts are multiples of 8 from 24 to 256. Takers wait until there are enough.
#pragma once

namespace flashbpt::ptx {

template <int kRegisters>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flashbpt::ptx
