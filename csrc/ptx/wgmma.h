// Products of a warpgroup, d [64, N] += a [64, 16] b [16, N], fp32 sums of 16-bit elements (PTX ISA
// 9.7.15, wgmma). A lane of warp w holds d[n][0, 1] of row 16 w + lane / 4, d[n][2, 3] of that row
// + 8, columns 8 n + 2 (lane % 4) and the next: the layout of mma.h, one m16 a warp.
//
// b, and a unless it is in registers, are descriptors of shared memory (tile/wgmma_operand.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flashbpt::ptx {

// Before the first product that reads registers or accumulates into ones that others have written.
__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Ends a group of products, which are waited for together.
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most kPending groups are under way.
template <int kPending>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: what touches these registers stays on its side of this point. Accumulators are
// pinned before the fence and after the wait, registers of a after the wait of their last product.
template <int kN>
__device__ void pin(float (&d)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
}
template <int kSteps>
__device__ void pin(uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[k][i])::"memory");
}

// How an operand lies in shared memory: its inner dimension, or its outer one, along the columns.
enum class Major { kInner, kOuter };

// wgmma<T, kA, kB>(d, a, b, accumulate) with two descriptors, wgmma<T, kB>(d, registers of a, b,
// accumulate): d += a b, or d = a b without `accumulate`. The size of d says which N.
//
// The text of an instruction names each of its registers: D0, D1, ... are the numbers of 8 of them,
// D32 to D128 of so many, R32 to R128 the registers d itself as operands of asm. What comes after
// them is given by its number.
#define FLASHBPT_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASHBPT_D1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHBPT_D2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FLASHBPT_D3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHBPT_D4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHBPT_D5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHBPT_D6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASHBPT_D7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHBPT_D8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FLASHBPT_D9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FLASHBPT_D10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FLASHBPT_D11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHBPT_D12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FLASHBPT_D13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FLASHBPT_D14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FLASHBPT_D15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FLASHBPT_D32 FLASHBPT_D0 ", " FLASHBPT_D1 ", " FLASHBPT_D2 ", " FLASHBPT_D3
#define FLASHBPT_D48 FLASHBPT_D32 ", " FLASHBPT_D4 ", " FLASHBPT_D5
#define FLASHBPT_D64 FLASHBPT_D48 ", " FLASHBPT_D6 ", " FLASHBPT_D7
#define FLASHBPT_D96 \
  FLASHBPT_D64 ", " FLASHBPT_D8 ", " FLASHBPT_D9 ", " FLASHBPT_D10 ", " FLASHBPT_D11
#define FLASHBPT_D128 \
  FLASHBPT_D96 ", " FLASHBPT_D12 ", " FLASHBPT_D13 ", " FLASHBPT_D14 ", " FLASHBPT_D15

#define FLASHBPT_R4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FLASHBPT_R16(n) \
  FLASHBPT_R4(n), FLASHBPT_R4((n) + 1), FLASHBPT_R4((n) + 2), FLASHBPT_R4((n) + 3)
#define FLASHBPT_R32 FLASHBPT_R16(0), FLASHBPT_R16(4)
#define FLASHBPT_R48 FLASHBPT_R32, FLASHBPT_R16(8)
#define FLASHBPT_R64 FLASHBPT_R48, FLASHBPT_R16(12)
#define FLASHBPT_R96 FLASHBPT_R64, FLASHBPT_R16(16), FLASHBPT_R16(20)
#define FLASHBPT_R128 FLASHBPT_R96, FLASHBPT_R16(24), FLASHBPT_R16(28)

// shape: m64nNk16; count: of registers of d; i0 ...: numbers of the operands after those.
#define FLASHBPT_WGMMA_SS(type, shape, count, i0, i1, i2, i3, i4)                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                           \
               ", 0;\n"                                                                           \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" FLASHBPT_D##count \
               "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n}"                           \
               : FLASHBPT_R##count                                                                \
               : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kA == Major::kOuter}),             \
                 "n"(int{kB == Major::kOuter}))
#define FLASHBPT_WGMMA_RS(type, shape, count, i0, i1, i2, i3, i4, i5, i6)                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5                                           \
               ", 0;\n"                                                                           \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" FLASHBPT_D##count \
               "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";\n}"     \
               : FLASHBPT_R##count                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}),        \
                 "n"(int{kB == Major::kOuter}))
#define FLASHBPT_WGMMA_OF(n, count, i0, i1, i2, i3, i4, i5, i6)                          \
  template <typename T, Major kA, Major kB>                                              \
  __device__ void wgmma(float (&d)[n / 8][4], uint64_t a, uint64_t b, bool accumulate) { \
    if constexpr (std::is_same_v<T, __half>)                                             \
      FLASHBPT_WGMMA_SS("f16", "m64n" #n "k16", count, i0, i1, i2, i3, i4);              \
    else                                                                                 \
      FLASHBPT_WGMMA_SS("bf16", "m64n" #n "k16", count, i0, i1, i2, i3, i4);             \
  }                                                                                      \
  template <typename T, Major kB>                                                        \
  __device__ void wgmma(float (&d)[n / 8][4], const uint32_t (&a)[4], uint64_t b,        \
                        bool accumulate) {                                               \
    if constexpr (std::is_same_v<T, __half>)                                             \
      FLASHBPT_WGMMA_RS("f16", "m64n" #n "k16", count, i0, i1, i2, i3, i4, i5, i6);      \
    else                                                                                 \
      FLASHBPT_WGMMA_RS("bf16", "m64n" #n "k16", count, i0, i1, i2, i3, i4, i5, i6);     \
  }

FLASHBPT_WGMMA_OF(64, 32, 32, 33, 34, 35, 36, 37, 38)
FLASHBPT_WGMMA_OF(96, 48, 48, 49, 50, 51, 52, 53, 54)
FLASHBPT_WGMMA_OF(128, 64, 64, 65, 66, 67, 68, 69, 70)
FLASHBPT_WGMMA_OF(192, 96, 96, 97, 98, 99, 100, 101, 102)
FLASHBPT_WGMMA_OF(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef FLASHBPT_D0
#undef FLASHBPT_D1
#undef FLASHBPT_D2
#undef FLASHBPT_D3
#undef FLASHBPT_D4
#undef FLASHBPT_D5
#undef FLASHBPT_D6
#undef FLASHBPT_D7
#undef FLASHBPT_D8
#undef FLASHBPT_D9
#undef FLASHBPT_D10
#undef FLASHBPT_D11
#undef FLASHBPT_D12
#undef FLASHBPT_D13
#undef FLASHBPT_D14
#undef FLASHBPT_D15
#undef FLASHBPT_D32
#undef FLASHBPT_D48
#undef FLASHBPT_D64
#undef FLASHBPT_D96
#undef FLASHBPT_D128
#undef FLASHBPT_R4
#undef FLASHBPT_R16
#undef FLASHBPT_R32
#undef FLASHBPT_R48
#undef FLASHBPT_R64
#undef FLASHBPT_R96
#undef FLASHBPT_R128
#undef FLASHBPT_WGMMA_SS
#undef FLASHBPT_WGMMA_RS
#undef FLASHBPT_WGMMA_OF

}  // namespace flashbpt::ptx
