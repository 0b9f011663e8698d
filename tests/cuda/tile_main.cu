// Checks the tile layer of sm80 alone, without torch: copies, stores, operands and products of a
// warp. From the root of the repository:
//
//   nvcc -cudart static -gencode arch=compute_90a,code=sm_90a -O3 --std=c++20 \
//       --expt-relaxed-constexpr tests/cuda/tile_main.cu -o tile_main && ./tile_main
//
// Exit status 0: every check held.
#include <random>

#include "../../csrc/tile/copy.h"
#include "../../csrc/tile/gemm.h"
#include "../../csrc/tile/store.h"
#include "harness.h"

using namespace flashbpt::tile;
namespace ptx = flashbpt::ptx;

namespace {

using Random = std::mt19937_64;

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::printf("FAIL %s\n", what.c_str());
}

// ---------------------------------------------------------------------------------------- copies

struct CopyArgs {
  GmemRows from;
  int rows, row_bytes;
};

// out: the tile as rows of bytes.
template <int kRows, int kRowBytes, int kThreads>
__global__ void copy_kernel(CopyArgs args, uint8_t* out) {
  using Tile = SmemTile<kRowBytes>;
  extern __shared__ __align__(1024) char smem[];
  const Tile tile{smem_address(smem)};
  for (int i = threadIdx.x; i < kRows * kRowBytes / 4; i += kThreads)
    ptx::store_shared(tile.base + 4 * i, 0xdeadbeefu);
  __syncthreads();
  load_tile<kRows, kThreads>(tile, args.from, args.rows, args.row_bytes);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kRowBytes / 4; i += kThreads)
    reinterpret_cast<uint32_t*>(out)[i] =
        ptx::load_shared(tile.at(i * 4 / kRowBytes, i * 4 % kRowBytes));
}

template <int kRows, int kRowBytes, int kThreads>
void check_copies(Random& random) {
  for (const int access : {16, 8, 4, 2, 1})
    for (const int rows : {kRows + 9, kRows, kRows - 1, 1, 0})
      for (const int row_bytes : {kRowBytes + 64, kRowBytes, kRowBytes - 4, 20, 14, 7}) {
        const int64_t stride = (std::max(row_bytes, kRowBytes) + 31) / 16 * 16 + access % 16;
        const int there = std::min(rows, kRows);
        std::vector<uint8_t> source(access + stride * std::max(rows, 1));
        for (uint8_t& x : source) x = static_cast<uint8_t>(random());
        const Array<uint8_t> from(source), out(std::vector<uint8_t>(kRows * kRowBytes, 0x55));
        const int first = access % 16;
        copy_kernel<kRows, kRowBytes, kThreads><<<1, kThreads, kRows * kRowBytes>>>(
            {{reinterpret_cast<const char*>(from.data) + first, stride, access}, rows, row_bytes},
            out.data);
        check_cuda(cudaDeviceSynchronize(), "copy");
        std::vector<uint8_t> right(kRows * kRowBytes, 0);
        for (int r = 0; r < there; ++r)
          for (int b = 0; b < std::min(row_bytes, kRowBytes); ++b)
            right[r * kRowBytes + b] = source[first + r * stride + b];
        expect(differ(out.host(right.size()), right) == 0,
               "copy " + std::to_string(kRows) + " x " + std::to_string(kRowBytes) + " bytes, " +
                   std::to_string(kThreads) + " threads, access " + std::to_string(access) +
                   ", rows " + std::to_string(rows) + ", row bytes " + std::to_string(row_bytes));
      }
}

// ---------------------------------------------------------------------------------------- stores

template <int kRows, int kRowBytes, int kThreads>
__global__ void store_kernel(const uint32_t* in, __nv_bfloat16* out, int64_t stride, int rows,
                             int cols, int access) {
  using Tile = SmemTile<kRowBytes>;
  extern __shared__ __align__(1024) char smem[];
  const Tile tile{smem_address(smem)};
  for (int i = threadIdx.x; i < kRows * kRowBytes / 4; i += kThreads)
    ptx::store_shared(tile.at(i * 4 / kRowBytes, i * 4 % kRowBytes), in[i]);
  __syncthreads();
  store_chunks<kRows, kThreads>(tile, 0, out, stride, rows, cols, access, threadIdx.x);
}

template <int kRows, int kRowBytes, int kThreads>
void check_stores(Random& random) {
  constexpr int kCols = kRowBytes / 2;
  for (const int access : {16, 8, 2})
    for (const int rows : {kRows + 5, kRows, kRows - 3, 0})
      for (const int cols : {kCols + 8, kCols, kCols - 1, kCols - 8, 3}) {
        const int64_t stride = (std::max(cols, kCols) + 15) / 8 * 8 + access % 16 / 2;
        std::vector<uint32_t> values(kRows * kCols / 2);
        for (uint32_t& x : values) x = static_cast<uint32_t>(random());
        std::vector<uint16_t> right(8 + stride * std::max(rows, 1), 0x7e7e);
        const Array<uint32_t> in(values);
        const Array<uint16_t> out(right);
        const int first = access % 16 / 2;
        store_kernel<kRows, kRowBytes, kThreads><<<1, kThreads, kRows * kRowBytes>>>(
            in.data, reinterpret_cast<__nv_bfloat16*>(out.data) + first, stride, rows, cols,
            access);
        check_cuda(cudaDeviceSynchronize(), "store");
        for (int r = 0; r < std::min(rows, kRows); ++r)
          for (int c = 0; c < std::min(cols, kCols); ++c)
            right[first + r * stride + c] =
                static_cast<uint16_t>(values[(r * kCols + c) / 2] >> (c % 2 * 16));
        expect(differ(out.host(right.size()), right) == 0,
               "store " + std::to_string(kRows) + " x " + std::to_string(kCols) + ", access " +
                   std::to_string(access) + ", rows " + std::to_string(rows) + ", cols " +
                   std::to_string(cols));
      }
}

// -------------------------------------------------------------------------------------- products

enum class Form {
  kRows,            // a as rows of the inner dimension, b as rows of the inner dimension
  kTransposed,      // a and b as rows of their outer dimensions
  kRowsTransposed,  // a as rows, b transposed, in the natural order
  kPairs,           // the same in the order of pairs
  kRegisters,       // a from an accumulator, b transposed
};

// d [32, 64] = a [32, 32] b [32, 64] by one warp. a, b: row-major in global memory.
template <typename T, Form kForm, Precision kPrecision>
__global__ void gemm_kernel(const T* a, const T* b, float* d) {
  constexpr int kInnerDim = 32, kM = 2, kN = 8, kSteps = kInnerDim / kInner<T>;
  constexpr bool kATransposed = kForm == Form::kTransposed, kBRows = kForm == Form::kRows;
  constexpr int kABytes = (kATransposed ? 32 : kInnerDim) * int{sizeof(T)};
  constexpr int kBBytes = (kBRows ? kInnerDim : 64) * int{sizeof(T)};
  using ATile = SmemTile<kABytes>;
  using BTile = SmemTile<kBBytes>;
  __shared__ __align__(1024) char a_smem[32 * 128], b_smem[64 * 256];
  const ATile a_tile{smem_address(a_smem)};
  const BTile b_tile{smem_address(b_smem)};
  const auto put = [](uint32_t at, T x) { *static_cast<T*>(__cvta_shared_to_generic(at)) = x; };
  for (int i = threadIdx.x; i < 32 * kInnerDim; i += 32) {
    const int row = i / kInnerDim, k = i % kInnerDim;
    put(kATransposed ? a_tile.at(k, row * int{sizeof(T)}) : a_tile.at(row, k * int{sizeof(T)}),
        a[i]);
  }
  for (int i = threadIdx.x; i < kInnerDim * 64; i += 32) {
    const int k = i / 64, col = i % 64;
    put(kBRows ? b_tile.at(col, k * int{sizeof(T)}) : b_tile.at(k, col * int{sizeof(T)}), b[i]);
  }
  __syncwarp();
  float sum[kM][kN][4];
  clear(sum);
  if constexpr (kForm == Form::kRows)
    gemm<T, kPrecision, kSteps>(sum, SmemA<T, kM, ATile>(a_tile, 0),
                                SmemB<T, kN, BTile>(b_tile, 0));
  else if constexpr (kForm == Form::kTransposed)
    gemm<T, kPrecision, kSteps>(sum, SmemTransposedA<T, kM, ATile>(a_tile, 0),
                                SmemTransposedB<T, kN, BTile>(b_tile, 0));
  else if constexpr (kForm == Form::kRowsTransposed)
    gemm<T, kPrecision, kSteps>(sum, SmemA<T, kM, ATile>(a_tile, 0),
                                SmemTransposedB<T, kN, BTile, false>(b_tile, 0));
  else if constexpr (kForm == Form::kPairs)
    gemm<T, kPrecision, kSteps>(sum, SmemA<T, kM, ATile, true>(a_tile, 0),
                                SmemTransposedB<T, kN, BTile>(b_tile, 0));
  else {
    float fragment[kM][kInnerDim / 8][4];
    for (int m = 0; m < kM; ++m)
      for (int n = 0; n < kInnerDim / 8; ++n)
        for (int i = 0; i < 4; ++i)
          fragment[m][n][i] =
              Element<T>::to_float(a[(16 * m + i / 2 * 8 + threadIdx.x / 4) * kInnerDim + 8 * n +
                                     threadIdx.x % 4 * 2 + i % 2]);
    gemm<T, kPrecision, kSteps>(sum, RegistersA<T, kM, kInnerDim / 8>(fragment),
                                SmemTransposedB<T, kN, BTile>(b_tile, 0));
  }
  const int row = threadIdx.x / 4, col = threadIdx.x % 4 * 2;
  store_fp32(sum, d + row * 64 + col, 64, 32 - row, 64 - col, true);
}

template <typename T, Form kForm, Precision kPrecision = Precision::k3xTf32>
void check_product(Random& random, const char* name) {
  std::normal_distribution<double> normal;
  std::vector<T> a(32 * 32), b(32 * 64);
  for (T& x : a) x = from_double<T>(normal(random));
  for (T& x : b) x = from_double<T>(normal(random));
  const Array<T> a_gmem(a), b_gmem(b);
  const Array<float> d(std::vector<float>(32 * 64, 1e9f));
  gemm_kernel<T, kForm, kPrecision><<<1, 32>>>(a_gmem.data, b_gmem.data, d.data);
  check_cuda(cudaDeviceSynchronize(), name);
  const std::vector<float> got = d.host(32 * 64);
  const double eps = kPrecision == Precision::kTf32 && sizeof(T) == 4 ? 0x1p-11 : 0x1p-23;
  double worst = 0;
  for (int r = 0; r < 32; ++r)
    for (int c = 0; c < 64; ++c) {
      double right = 0, size = 0;
      for (int k = 0; k < 32; ++k) {
        const double x = to_double(a[r * 32 + k]) * to_double(b[k * 64 + c]);
        right += x, size += std::abs(x);
      }
      const double error = std::abs(got[r * 64 + c] - right) / (size * eps);
      if (!(error <= worst)) worst = error;  // NaN too
    }
  expect(worst < 4, std::string(Type<T>::kName) + " product, " + name + ": error of " +
                        std::to_string(worst) + " eps");
}

template <typename T>
void check_products(Random& random) {
  check_product<T, Form::kRows>(random, "rows");
  check_product<T, Form::kTransposed>(random, "transposed");
  check_product<T, Form::kRowsTransposed>(random, "rows and transposed");
  check_product<T, Form::kPairs>(random, "in pairs");
  check_product<T, Form::kRegisters>(random, "registers");
  if constexpr (sizeof(T) == 4) {
    check_product<T, Form::kRows, Precision::kTf32>(random, "rows, TF32");
    check_product<T, Form::kRegisters, Precision::kTf32>(random, "registers, TF32");
  }
}

// Infinities and NaN come out where fp32 has them.
void check_special_values() {
  // In 3xTF32 the parts of the two largest numbers, each rounded, add up to infinity.
  constexpr float kLargest = std::numeric_limits<float>::max(), kLarge = 0x1.fffffap127f;
  for (const float special : {INFINITY, -INFINITY, NAN, kLarge, -kLarge, kLargest, -kLargest}) {
    std::vector<float> a(32 * 32, 0.0f), b(32 * 64, 1.0f);
    a[5 * 32 + 3] = special, a[6 * 32 + 3] = 1.0f, b[3 * 64 + 7] = special, b[4 * 64 + 9] = special;
    std::vector<float> right(32 * 64);
    for (int r = 0; r < 32; ++r)
      for (int c = 0; c < 64; ++c) {
        double sum = 0;
        for (int k = 0; k < 32; ++k) sum += double{a[r * 32 + k]} * b[k * 64 + c];
        right[r * 64 + c] = static_cast<float>(sum);
      }
    const Array<float> a_gmem(a), b_gmem(b), d(std::vector<float>(32 * 64, 1e9f));
    const auto check = [&](const char* name, double eps) {
      check_cuda(cudaDeviceSynchronize(), name);
      const std::vector<float> got = d.host(32 * 64);
      bool ok = true;
      for (int i = 0; i < 32 * 64; ++i) ok &= agrees(got[i], right[i], eps * std::abs(right[i]));
      expect(ok, std::string("special value ") + std::to_string(special) + ", " + name);
    };
    gemm_kernel<float, Form::kRows, Precision::k3xTf32>
        <<<1, 32>>>(a_gmem.data, b_gmem.data, d.data);
    if (std::abs(special) != kLargest) check("3xTF32", 0x1p-22);
    gemm_kernel<float, Form::kRows, Precision::kTf32><<<1, 32>>>(a_gmem.data, b_gmem.data, d.data);
    check("TF32", 0x1p-9);
  }
}

}  // namespace

int main() {
  Random random(7);
  check_copies<64, 128, 128>(random);
  check_copies<128, 256, 128>(random);
  check_copies<64, 512, 256>(random);
  check_copies<32, 64, 128>(random);  // threads are exactly a tile
  check_copies<16, 64, 128>(random);  // or more than one
  check_stores<32, 128, 32>(random);
  check_stores<64, 256, 128>(random);
  check_stores<64, 512, 256>(random);
  check_products<__nv_bfloat16>(random);
  check_products<__half>(random);
  check_products<float>(random);
  check_special_values();
  std::printf(failures ? "%d checks failed\n" : "every check held\n", failures);
  return failures != 0;
}
