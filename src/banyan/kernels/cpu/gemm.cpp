// Tiles, threads and the choice of the tile kernel. Layout and promises: gemm.h.
#include "banyan/kernels/cpu/gemm.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "banyan/core/error.h"
#include "banyan/kernels/cpu/bf16_product.h"
#include "banyan/kernels/cpu/matmul_block.h"
#include "banyan/kernels/cpu/vecmath.h"
#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {

namespace {

enum class TileKernel { kPortable, kRegisters, kBrgemm, kAmx };

bool brgemm_works() {
  constexpr int64_t kDepth = 4;
  std::vector<BFloat16> a(kRowStep * kDepth, BFloat16(0.5f));
  std::vector<BFloat16> b(kDepth * kPanel, BFloat16(2.0f));
  std::vector<float> c(kRowStep * kPanel, 0.0f);
  try {
    at::native::cpublas::brgemm(kRowStep,
                                kPanel,
                                kDepth,
                                kDepth,
                                kPanel,
                                kPanel,
                                /*add_C=*/false,
                                a.data(),
                                b.data(),
                                c.data(),
                                /*is_vnni=*/true);
    at::native::cpublas::brgemm_release(/*is_vnni=*/true);
  } catch (const std::exception&) {
    return false;
  }
  return std::all_of(c.begin(), c.end(), [](float v) { return v == 4.0f; });
}

bool has_amx() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("amx-bf16");
#else
  return false;
#endif
}

// brgemm where the processor multiplies bf16 in some way.
std::optional<TileKernel> brgemm_kernel() {
#if defined(__x86_64__)
  if ((has_amx() || __builtin_cpu_supports("avx512bf16")) && brgemm_works()) {
    return has_amx() ? TileKernel::kAmx : TileKernel::kBrgemm;
  }
#endif
  return std::nullopt;
}

TileKernel fastest_kernel() {
  if (bf16_product_available() && !has_amx()) return TileKernel::kRegisters;
  if (const std::optional<TileKernel> kernel = brgemm_kernel()) return *kernel;
  return bf16_product_available() ? TileKernel::kRegisters : TileKernel::kPortable;
}

TileKernel choose_kernel() {
  const char* wish = std::getenv("BANYAN_GEMM_KERNEL");
  const std::string word = wish == nullptr ? "" : wish;
  if (word.empty()) return fastest_kernel();
  if (word == "portable") return TileKernel::kPortable;
  if (word == "registers" && bf16_product_available()) return TileKernel::kRegisters;
  const std::optional<TileKernel> brgemm = word == "brgemm" ? brgemm_kernel() : std::nullopt;
  BANYAN_CHECK(brgemm.has_value(),
               "[kernels] BANYAN_GEMM_KERNEL: wanted portable, or registers or brgemm on a "
               "processor with bf16 products, got '",
               word,
               "'");
  return *brgemm;
}

std::atomic<bool> portable_forced{false};

TileKernel tile_kernel() {
  static const TileKernel kernel = choose_kernel();
  return portable_forced.load(std::memory_order_relaxed) ? TileKernel::kPortable : kernel;
}

BANYAN_MULTIVERSION
void round_rows(const float* c,
                int64_t ldc,
                int64_t rows,
                int64_t columns,
                const uint16_t* bias,
                const uint16_t* residual,
                uint16_t* out,
                int64_t ld_out) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = c + r * ldc;
    uint16_t* to = out + r * ld_out;
    if (residual != nullptr) {
      const uint16_t* add = residual + r * ld_out;
      for (int64_t j = 0; j < columns; ++j) {
        const float sum = bias == nullptr ? from[j] : from[j] + bf16_to_f32(bias[j]);
        to[j] = f32_to_bf16(bf16_to_f32(f32_to_bf16(sum)) + bf16_to_f32(add[j]));
      }
    } else if (bias != nullptr) {
      for (int64_t j = 0; j < columns; ++j) to[j] = f32_to_bf16(from[j] + bf16_to_f32(bias[j]));
    } else {
      for (int64_t j = 0; j < columns; ++j) to[j] = f32_to_bf16(from[j]);
    }
  }
}

// Rows of A that stay in the second-level cache while the panels pass by.
int64_t group_rows(int64_t depth) {
  constexpr int64_t kBytes = 384 << 10;
  const int64_t rows = kBytes / (2 * std::max<int64_t>(depth, 1));
  return std::clamp<int64_t>(rows / kRowTile * kRowTile, kRowTile, 4 * kRowTile);
}

// A group of rows times one panel of B or half of it.
struct Block {
  int64_t first = 0;  // rows [first, last)
  int64_t last = 0;
  int64_t column = 0;
  int64_t columns = 0;          // that exist
  int64_t width = 0;            // that are multiplied: kPanel or half of it
  const BFloat16* b = nullptr;  // into the panel
};

// Calls run(next) on the threads; `next(block)` yields the next block, or false when none is left.
template <typename Run>
void for_each_block(int64_t rows, const Panels& b, const Run& run) {
  if (rows == 0 || b.columns == 0) return;
  const int64_t group = group_rows(b.depth);
  const int64_t num_groups = divide_up(rows, group);
  // Few panels are cut in two, so that the threads get equal parts.
  const int64_t threads = at::get_num_threads();
  const int64_t width = num_groups * b.count() < 8 * threads ? kPanel / 2 : kPanel;
  const int64_t num_columns = divide_up(b.columns, width);
  // The last group has fewer rows: equal shares of the items would not be equal work.
  const bool tiny = rows * b.columns * b.depth < (1 << 18);
  for_each_item(num_groups * num_columns, tiny ? 1 : threads, [&](const auto& next_item) {
    run([&](Block& block) {
      const int64_t item = next_item();
      if (item < 0) return false;
      block.column = item % num_columns * width;
      block.columns = std::min(width, b.columns - block.column);
      block.width = width;
      block.b = b.panel(block.column / kPanel) + block.column % kPanel * 2;
      block.first = item / num_columns * group;
      block.last = std::min(rows, block.first + group);
      return true;
    });
  });
}

// Calls store(tile, row, rows, column, columns) for every tile of a B; tile has row stride kPanel.
template <typename Store>
void for_each_tile(
    const BFloat16* a, int64_t lda, int64_t rows, const Panels& b, const Store& store) {
  for_each_block(rows, b, [&](const auto& next) {
    thread_local Scratch rows_scratch;
    alignas(64) float tile[kRowTile * kPanel];
    int64_t copied = -1;  // first row of the tile that rows_scratch holds
    RowTile copy;
    for (Block block; next(block);) {
      for (int64_t row = block.first; row < block.last; row += kRowTile) {
        const int64_t n = std::min(kRowTile, block.last - row);
        RowTile rows_of_a{a + row * lda, lda, n};
        if (n % row_step() != 0 || b.depth % 2 != 0) {
          if (copied != row) copy = row_tile(a + row * lda, lda, n, b.depth, rows_scratch);
          copied = row;
          rows_of_a = copy;
        }
        gemm_tile(rows_of_a, block.b, b.padded_depth(), block.width, /*add=*/false, tile, kPanel);
        store(tile, row, n, block.column, block.columns);
      }
    }
    gemm_release();
  });
}

}  // namespace

bool native_gemm_available() { return tile_kernel() != TileKernel::kPortable; }

bool has_register_tiles() { return tile_kernel() == TileKernel::kRegisters; }

const char* gemm_kernel_name() {
  switch (tile_kernel()) {
    case TileKernel::kAmx:
      return "brgemm (amx)";
    case TileKernel::kBrgemm:
      return "brgemm (avx512_bf16)";
    case TileKernel::kRegisters:
      return "register tiles (avx512_bf16)";
    default:
      return "portable loop";
  }
}

PortableGemm::PortableGemm() { portable_forced = true; }
PortableGemm::~PortableGemm() { portable_forced = false; }

int64_t row_step() {
  const TileKernel kernel = tile_kernel();
  return kernel == TileKernel::kBrgemm || kernel == TileKernel::kAmx ? kRowStep : 1;
}

void gemm_tile(const RowTile& a,
               const BFloat16* b,
               int64_t depth,
               int64_t columns,
               bool add,
               float* c,
               int64_t ldc,
               const Ahead& ahead) {
  const TileKernel kernel = tile_kernel();
  if (kernel == TileKernel::kRegisters) {
    bf16_product({.a = a.data,
                  .lda = a.ld,
                  .rows = a.rows,
                  .b = b,
                  .ldb = kPanel,
                  .depth = depth,
                  .columns = columns,
                  .add = add,
                  .c = c,
                  .ldc = ldc,
                  .ahead = ahead.at,
                  .ahead_bytes = ahead.bytes,
                  .then = ahead.then});
  } else if (kernel != TileKernel::kPortable) {
    at::native::cpublas::brgemm(a.rows,
                                columns,
                                depth,
                                a.ld,
                                kPanel,
                                ldc,
                                add,
                                a.data,
                                b,
                                c,
                                /*is_vnni=*/true);
  } else {
    gemm_tile_portable(a, b, depth, columns, add, c, ldc);
  }
}

void gemm_release() {
  if (tile_kernel() == TileKernel::kAmx) at::native::cpublas::brgemm_release(/*is_vnni=*/true);
}

RowTile row_tile(const BFloat16* a, int64_t lda, int64_t rows, int64_t depth, Scratch& scratch) {
  if (rows % row_step() == 0 && depth % 2 == 0) return {a, lda, rows};
  const int64_t padded_rows = round_up(rows, row_step());
  const int64_t padded_depth = round_up(depth, 2);
  BFloat16* copy = scratch.get<BFloat16>(kRowTile * padded_depth);
  std::memset(static_cast<void*>(copy), 0, sizeof(BFloat16) * padded_rows * padded_depth);
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(static_cast<void*>(copy + r * padded_depth), a + r * lda, sizeof(BFloat16) * depth);
  }
  return {copy, padded_depth, padded_rows};
}

void store_bf16(const float* c,
                int64_t ldc,
                int64_t rows,
                int64_t columns,
                const BFloat16* bias,
                BFloat16* out,
                int64_t ld_out,
                const BFloat16* residual) {
  round_rows(c,
             ldc,
             rows,
             columns,
             reinterpret_cast<const uint16_t*>(bias),
             reinterpret_cast<const uint16_t*>(residual),
             reinterpret_cast<uint16_t*>(out),
             ld_out);
}

void gemm(const BFloat16* a,
          int64_t lda,
          int64_t rows,
          const Panels& b,
          const BFloat16* bias,
          BFloat16* c,
          int64_t ldc,
          const BFloat16* residual) {
  const auto at = [](const BFloat16* values, int64_t offset) {
    return values == nullptr ? nullptr : values + offset;
  };
  if (has_register_tiles() && b.depth % 2 == 0 && b.columns % kPanel == 0) {
    for_each_block(rows, b, [&](const auto& next) {
      for (Block block; next(block);) {
        const int64_t offset = block.first * ldc + block.column;
        matmul_round({.a = a + block.first * lda,
                      .lda = lda,
                      .rows = block.last - block.first,
                      .b = block.b,
                      .depth = b.depth,
                      .columns = block.width},
                     {.bias = at(bias, block.column),
                      .residual = at(residual, offset),
                      .out = c + offset,
                      .ld = ldc});
      }
    });
    return;
  }
  const auto store =
      [&](const float* tile, int64_t row, int64_t n, int64_t column, int64_t columns) {
        const int64_t offset = row * ldc + column;
        store_bf16(
            tile, kPanel, n, columns, at(bias, column), c + offset, ldc, at(residual, offset));
      };
  for_each_tile(a, lda, rows, b, store);
}

void gemm(const BFloat16* a, int64_t lda, int64_t rows, const Panels& b, float* c, int64_t ldc) {
  const auto store =
      [&](const float* tile, int64_t row, int64_t n, int64_t column, int64_t columns) {
        for (int64_t r = 0; r < n; ++r) {
          std::memcpy(c + (row + r) * ldc + column, tile + r * kPanel, sizeof(float) * columns);
        }
      };
  for_each_tile(a, lda, rows, b, store);
}

}  // namespace banyan::kernels
