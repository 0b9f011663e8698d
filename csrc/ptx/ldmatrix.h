// 8 x 8 matrices of 16-bit elements from shared memory (PTX ISA 9.7.14.5.15, ldmatrix). Every lane
// names one row of 16 bytes: lanes 8 i ... 8 i + 7 those of matrix i, which lands in register i.
#pragma once

#include <cstdint>

namespace flashbpt::ptx {

// Lane 4 r + c gets the bytes 4 c ... 4 c + 3 of row r.
__device__ inline void ldmatrix_x4(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3,
                                   uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(row_smem));
}

// The same of the transposed matrices.
__device__ inline void ldmatrix_x4_trans(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3,
                                         uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(row_smem));
}

// Of two matrices, whose rows lanes 0 to 15 name.
__device__ inline void ldmatrix_x2_trans(uint32_t& r0, uint32_t& r1, uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(row_smem));
}

}  // namespace flashbpt::ptx
