// Checks and times the mask_tiles kernel alone, without torch. docs/mask_tiles.md has the commands.
// Exit status 0: every check held.
#include <random>

#include "../../csrc/sm80/mask_tiles/launch.h"
#include "harness.h"

using flashbpt::DataType;
using flashbpt::sm80::launch_mask_tiles;

namespace {

using Random = std::mt19937_64;

struct MaskShape {
  int64_t sizes[4];
  int64_t strides[4];
  int64_t first = 0;
};

void check_mask(const MaskShape& s, Random& random, bool* ok) {
  const auto [batch, heads, rows, cols] = s.sizes;
  int64_t span = s.first + 1;
  for (int d = 0; d < 4; ++d) span += std::max<int64_t>(s.sizes[d] - 1, 0) * s.strides[d];
  std::vector<uint8_t> mask(span);
  for (uint8_t& x : mask) x = random() % 2;
  const auto at = [&](int64_t b, int64_t h, int64_t r, int64_t c) -> uint8_t& {
    return mask[s.first + b * s.strides[0] + h * s.strides[1] + r * s.strides[2] +
                c * s.strides[3]];
  };
  const int64_t row_tiles = (rows + 63) / 64, col_tiles = (cols + 15) / 16;
  // Whole tiles of one value with at most one exception; true may be any byte that is not 0.
  const auto for_tiles = [&](auto use) {
    for (int64_t t = 0; t < batch * heads * row_tiles * col_tiles; ++t)
      use(t, t / col_tiles / row_tiles / heads, t / col_tiles / row_tiles % heads,
          t / col_tiles % row_tiles * 64, t % col_tiles * 16);
  };
  for_tiles([&](int64_t, int64_t b, int64_t h, int64_t row, int64_t col) {
    const unsigned kind = random() % 5;
    const int64_t r1 = std::min(row + 64, rows), c1 = std::min(col + 16, cols);
    if (kind == 4) return;
    for (int64_t r = row; r < r1; ++r)
      for (int64_t c = col; c < c1; ++c)
        at(b, h, r, c) = kind % 2 == 0 ? 0 : random() % 3 ? 1 : 1 + random() % 255;
    if (kind >= 2) {
      uint8_t& x = at(b, h, row + random() % (r1 - row), col + random() % (c1 - col));
      x = x == 0 ? 1 << random() % 8 : 0;
    }
  });
  const int64_t n = batch * heads * row_tiles * col_tiles;
  std::vector<uint8_t> right(n + 64, 0xee);
  const Array<uint8_t> tiles(right), mask_gmem(mask);
  for_tiles([&](int64_t t, int64_t b, int64_t h, int64_t row, int64_t col) {
    bool any = false, all = true;
    for (int64_t r = row; r < std::min(row + 64, rows); ++r)
      for (int64_t c = col; c < std::min(col + 16, cols); ++c)
        any |= at(b, h, r, c) != 0, all &= at(b, h, r, c) != 0;
    right[t] = any + 2 * all;
  });
  launch_mask_tiles({mask_gmem.data + s.first, DataType::kBool, s.strides[0], s.strides[1],
                     s.strides[2], s.strides[3]},
                    s.sizes, tiles.data, nullptr);
  check_cuda(cudaGetLastError(), "launch");
  check_cuda(cudaDeviceSynchronize(), "mask_tiles");
  const int64_t wrong = differ(tiles.host(right.size()), right);
  std::printf("mask     [%lld, %lld, %lld, %lld]  %s\n", (long long)batch, (long long)heads,
              (long long)rows, (long long)cols, wrong == 0 ? "ok" : "WRONG");
  if (wrong != 0) *ok = false;
}

void check_masks(Random& random, bool* ok) {
  const MaskShape shapes[] = {
      {{1, 1, 64, 16}, {0, 0, 16, 1}},
      {{2, 3, 130, 4096}, {3 * 130 * 4096, 130 * 4096, 4096, 1}},
      {{1, 2, 200, 1000}, {0, 200 * 1008, 1008, 1}, 16},
      {{1, 2, 200, 1000}, {0, 200 * 1008, 1008, 1}, 5},
      {{2, 2, 77, 77}, {2 * 77 * 77, 77 * 77, 77, 1}},
      {{3, 1, 1, 513}, {528, 0, 0, 1}},
      {{3, 1, 1, 513}, {513, 7, 9, 1}},
      {{1, 2, 150, 300}, {0, 300 * 160, 1, 160}},
      {{2, 2, 300, 70}, {0, 300, 1, 0}},
      {{2, 3, 65, 64}, {0, 64, 0, 1}},
      {{1, 70000, 3, 5}, {0, 15, 5, 1}},
      {{70000, 1, 1, 32}, {32, 32, 32, 1}},
      {{1, 1, 3, 0}, {0, 0, 0, 1}},
      {{1, 1, 1, 1}, {5, 5, 5, 5}, 3},
      {{1, 1, 5000, 1}, {0, 0, 1, 1}},
  };
  for (const MaskShape& s : shapes) check_mask(s, random, ok);
  // More than 2^31 elements: all true but the last.
  const int64_t sizes[4] = {1, 2, 40000, 40000}, count = sizes[1] * sizes[2] * sizes[3];
  Arena arena;
  uint8_t* mask = arena.take<uint8_t>(count);
  check_cuda(cudaMemset(mask, 1, count), "cudaMemset");
  check_cuda(cudaMemset(mask + count - 1, 0, 1), "cudaMemset");
  std::vector<uint8_t> right(2 * 625 * 2500, 3);
  right.back() = 1;
  const Array<uint8_t> tiles(right.size());
  launch_mask_tiles({mask, DataType::kBool, 0, count / 2, sizes[3], 1}, sizes, tiles.data, nullptr);
  const bool held = differ(tiles.host(right.size()), right) == 0;
  std::printf("mask     more than 2^31 elements  %s\n", held ? "ok" : "WRONG");
  if (!held) *ok = false;
}

void time_mask(int64_t heads, int64_t rows, int64_t cols) {
  const int64_t sizes[4] = {1, heads, rows, cols};
  const double bytes = double(heads) * rows * cols;
  const int sets = rotating_sets(bytes);
  Arena arena;
  std::vector<uint8_t*> masks, tiles;
  for (int i = 0; i < sets; ++i) {
    masks.push_back(arena.take<uint8_t>(bytes));
    tiles.push_back(arena.take<uint8_t>(heads * ((rows + 63) / 64) * ((cols + 15) / 16)));
  }
  const double seconds = median_seconds([&](int i) {
    launch_mask_tiles({masks[i % sets], DataType::kBool, 0, rows * cols, cols, 1}, sizes,
                      tiles[i % sets], nullptr);
  });
  print_time("mask_tiles  [1, " + std::to_string(heads) + ", " + std::to_string(rows) + ", " +
                 std::to_string(cols) + "]",
             seconds, bytes);
}

}  // namespace

int main() {
  cudaDeviceProp device;
  check_cuda(cudaGetDeviceProperties(&device, 0), "no GPU");
  Random random(std::random_device{}());
  bool ok = true;
  check_masks(random, &ok);
  std::printf("%s\n%s\n", ok ? "all checks held" : "CHECKS FAILED", device.name);
  time_mask(1, 2048, 2048);
  time_mask(1, 8192, 8192);
  time_mask(16, 8192, 8192);
  time_mask(16, 8191, 8191);
  time_mask(4096, 512, 77);
  return ok ? 0 : 1;
}
