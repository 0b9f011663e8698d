// Checks the Hopper layers, ptx/{mbarrier,tma,wgmma}.h and tile/{tensor_map,pipeline,wgmma_operand,
// store_pairs}.h, by a plain matrix product C = A B on them: both operands with the inner dimension
// along columns and along rows, bf16 and fp16, every N, odd sizes; then its rate at 8192 cubed.
// Exit status 0: every check held, or the device is no Hopper GPU.
//
//     nvcc -cudart static -gencode arch=compute_90a,code=sm_90a -O3 --std=c++20
//         --expt-relaxed-constexpr tests/cuda/wgmma_main.cu -o wgmma_main
#include <random>

#include "../../csrc/ptx/setmaxnreg.h"
#include "../../csrc/ptx/tma.h"
#include "../../csrc/tile/pipeline.h"
#include "../../csrc/tile/store_pairs.h"
#include "../../csrc/tile/tensor_map.h"
#include "../../csrc/tile/wgmma_operand.h"
#include "harness.h"

namespace {

namespace ptx = flashbpt::ptx;
namespace tile = flashbpt::tile;
using ptx::Major;

// C [m, n] = A B. kInner: A is stored [m, k], B [n, k]; kOuter: A [k, m], B [k, n].
struct GemmParams {
  CUtensorMap a, b;
  void* c;
  int m, n, k;
};

constexpr int kBlockM = 128, kBlockK = 64, kStages = 4;

template <int kBlockN, Major kA, Major kB>
struct GemmTiles {
  template <Major kMajor, int kOuter>
  using Tile = std::conditional_t<kMajor == Major::kInner, tile::SwizzledTile<kOuter, kBlockK>,
                                  tile::SwizzledTile<kBlockK, kOuter>>;
  using A = Tile<kA, kBlockM>;
  using B = Tile<kB, kBlockN>;
  struct SmemPlan {
    alignas(1024) char a[kStages][A::kBytes];
    alignas(1024) char b[kStages][B::kBytes];
    tile::PipelineSmem<kStages> pipeline;
  };
};

// Warpgroup 0 copies, by one thread; 1 and 2 multiply 64 rows each. Blocks walk over the tiles of C
// in bands of 16 tiles of rows, so that what runs together shares the L2 cache.
template <typename T, int kBlockN, Major kA, Major kB>
__global__ void __launch_bounds__(384, 1) gemm_kernel(const __grid_constant__ GemmParams p) {
  using Tiles = GemmTiles<kBlockN, kA, kB>;
  using A = typename Tiles::A;
  using B = typename Tiles::B;
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Tiles::SmemPlan*>(smem_raw);
  const tile::Pipeline<kStages> pipeline{smem.pipeline};
  if (threadIdx.x == 0) {
    pipeline.init(8);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int tiles_m = (p.m + kBlockM - 1) / kBlockM, tiles_n = (p.n + kBlockN - 1) / kBlockN;
  const int steps = (p.k + kBlockK - 1) / kBlockK, band = min(16, tiles_m);
  const auto place = [&](int t, int& m, int& n) {
    const int first = t / (band * tiles_n) * band, rest = t % (band * tiles_n);
    const int here = min(band, tiles_m - first);
    m = (first + rest % here) * kBlockM;
    n = rest / here * kBlockN;
  };
  tile::RingPlace<kStages> at;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::give_registers<24>();
    if (threadIdx.x != 0) return;
    for (int t = blockIdx.x; t < tiles_m * tiles_n; t += gridDim.x) {
      int m, n;
      place(t, m, n);
      for (int k = 0; k < p.k; k += kBlockK, at.advance()) {
        pipeline.start_filling(at, A::kBytes + B::kBytes);
        const auto load = [&](auto tile, const CUtensorMap& map, Major major, char* to, int outer) {
          using Tile = decltype(tile);
          for (int c = 0; c < Tile::kChunks; ++c)
            ptx::tma_load_4d(tile::smem_address(to) + c * Tile::kChunkBytes, map, pipeline.full(at),
                             ptx::CacheHint::kEvictLast,
                             (major == Major::kInner ? k : outer) + c * 64,
                             major == Major::kInner ? outer : k, 0, 0);
        };
        load(A(), p.a, kA, smem.a[at.stage()], m);
        load(B(), p.b, kB, smem.b[at.stage()], n);
      }
    }
    return;
  }
  ptx::take_registers<240>();
  // 64 rows of A: 64 rows of its tile, or one of its chunks of columns.
  const uint32_t a_smem = tile::smem_address(smem.a) +
                          (warpgroup - 1) * (kA == Major::kInner ? 64 * 128 : A::kChunkBytes);
  const tile::SmemOperand<A, kA> a(a_smem);
  const tile::SmemOperand<B, kB> b(tile::smem_address(smem.b));
  for (int t = blockIdx.x; t < tiles_m * tiles_n; t += gridDim.x) {
    int m, n;
    place(t, m, n);
    float c[kBlockN / 8][4];
    tile::RingPlace<kStages> last;
    for (int step = 0; step < steps; ++step) {
      pipeline.wait_full(at);
      if (step == 0)
        tile::start_gemm<T, true>(c, a.stage(at.stage()), b.stage(at.stage()));
      else
        tile::start_gemm<T, false>(c, a.stage(at.stage()), b.stage(at.stage()));
      ptx::wgmma_wait<1>();
      if (step > 0) pipeline.release(last);
      last = at;
      at.advance();
    }
    ptx::wgmma_wait<0>();
    ptx::pin(c);
    pipeline.release(last);
    const int row = m + (warpgroup - 1) * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    tile::store_pairs(c, static_cast<T*>(p.c) + int64_t{row} * p.n + n, p.n, p.m - row, p.n - n);
  }
}

template <typename T, int kBlockN, Major kA, Major kB>
struct Gemm {
  int m, n, k;
  Array<T> a, b, c;
  GemmParams p;

  static flashbpt::TensorView view(T* data, int64_t row) {
    return {data, Type<T>::kDtype, 0, 0, row, 1};
  }
  static CUtensorMap map(T* data, Major major, int outer, int inner, int box_outer) {
    return major == Major::kInner
               ? tile::make_tensor_map(view(data, inner), inner, outer, 1, 1, box_outer)
               : tile::make_tensor_map(view(data, outer), outer, inner, 1, 1, kBlockK);
  }

  Gemm(int m, int n, int k, const std::vector<T>& a_host, const std::vector<T>& b_host)
      : m(m), n(n), k(k), a(a_host), b(b_host), c(size_t(m) * n) {
    check_cuda(cudaMemset(c.data, 0xff, size_t(m) * n * sizeof(T)), "cudaMemset");
    p = {map(a.data, kA, m, k, kBlockM), map(b.data, kB, n, k, kBlockN), c.data, m, n, k};
  }
  void launch(cudaStream_t stream = nullptr) {
    constexpr auto kKernel = gemm_kernel<T, kBlockN, kA, kB>;
    constexpr int kSmem = sizeof(typename GemmTiles<kBlockN, kA, kB>::SmemPlan);
    check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem),
               "shared memory");
    kKernel<<<132, 384, kSmem, stream>>>(p);
    check_cuda(cudaGetLastError(), "gemm");
  }
};

template <typename T>
std::vector<T> random_elements(size_t count, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<T> host(count);
  for (T& x : host) x = from_double<T>(normal(bits));
  return host;
}

bool all_held = true;

template <typename T, int kBlockN, Major kA, Major kB>
void check(int m, int n, int k) {
  std::random_device seed;
  const auto a = random_elements<T>(size_t(m) * k, seed()),
             b = random_elements<T>(size_t(n) * k, seed());
  Gemm<T, kBlockN, kA, kB> gemm(m, n, k, a, b);
  gemm.launch();
  check_cuda(cudaDeviceSynchronize(), "gemm");
  const std::vector<T> c = gemm.c.host(size_t(m) * n);
  double worst = 0;
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int l = 0; l < k; ++l)
        sum += to_double(a[kA == Major::kInner ? size_t(i) * k + l : size_t(l) * m + i]) *
               to_double(b[kB == Major::kInner ? size_t(j) * k + l : size_t(l) * n + j]);
      const double off = std::abs(to_double(c[size_t(i) * n + j]) - sum);
      worst = std::max(worst,
                       std::isnan(off) ? kInfinity : off / (std::abs(sum) * Type<T>::kEps + 1e-4));
    }
  all_held = all_held && worst <= 1;
  std::printf("%s N %3d  A %s B %s  %d x %d x %d: worst %.3f of the bound  %s\n", Type<T>::kName,
              kBlockN, kA == Major::kInner ? "inner" : "outer",
              kB == Major::kInner ? "inner" : "outer", m, n, k, worst, worst <= 1 ? "ok" : "WRONG");
}

template <typename T, int kBlockN>
void check_majors() {
  check<T, kBlockN, Major::kInner, Major::kInner>(200, 264, 328);
  check<T, kBlockN, Major::kInner, Major::kOuter>(200, 264, 328);
  check<T, kBlockN, Major::kOuter, Major::kInner>(200, 264, 328);
  check<T, kBlockN, Major::kOuter, Major::kOuter>(136, 520, 72);
}

template <Major kA, Major kB>
void time_gemm(const std::vector<__nv_bfloat16>& a, const std::vector<__nv_bfloat16>& b, int n) {
  Gemm<__nv_bfloat16, 256, kA, kB> gemm(n, n, n, a, b);
  for (int i = 0; i < 100; ++i) gemm.launch();  // a cold chip is 10 to 15 % faster
  const double seconds = median_seconds([&](int) { gemm.launch(); });
  std::printf("bf16 %d cubed, A %s B %s: %.0f TFLOP/s\n", n,
              kA == Major::kInner ? "inner" : "outer", kB == Major::kInner ? "inner" : "outer",
              2.0 * n * n * n / seconds * 1e-12);
}

}  // namespace

int main() {
  cudaDeviceProp device;
  check_cuda(cudaGetDeviceProperties(&device, 0), "no GPU");
  if (device.major != 9) {
    std::printf("no Hopper GPU: nothing to check\n");
    return 0;
  }
  check_majors<__nv_bfloat16, 64>();
  check_majors<__nv_bfloat16, 96>();
  check_majors<__nv_bfloat16, 128>();
  check_majors<__nv_bfloat16, 192>();
  check_majors<__nv_bfloat16, 256>();
  check_majors<__half, 128>();
  std::printf("%s\n", all_held ? "all checks held" : "CHECKS FAILED");
  const int n = 8192;
  const auto a = random_elements<__nv_bfloat16>(size_t(n) * n, 1);
  const auto b = random_elements<__nv_bfloat16>(size_t(n) * n, 2);
  time_gemm<Major::kInner, Major::kInner>(a, b, n);
  time_gemm<Major::kInner, Major::kOuter>(a, b, n);
  return all_held ? 0 : 1;
}
