// dW += dyᵀ x. Per chunk of rows: dy is transposed to [out, chunk], x is packed over its rows, then
// each block of dW is one product added straight into the fp32 gradient. Chunks are as few and
// as equal as kMostDepth allows, since each costs one reading and writing of dW; the last one is
// filled with zero rows. So the order of a sum depends on the number of rows alone.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/matmul_block.h"
#include "banyan/kernels/cpu/vecmath.h"
#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {

namespace {

constexpr int64_t kMostDepth =
    1280;                           // a tile of dy and a panel of x stand in the second-level cache
constexpr int64_t kDepthStep = 64;  // few depths, so few kernels are compiled at run time
// Rows of dW for which a panel of x comes into the second-level cache once.
constexpr int64_t kBlockRows = 192;

BANYAN_MULTIVERSION
void sum_columns(const uint16_t* dy, int64_t ld, int64_t rows, int64_t columns, float* sums) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t* values = dy + row * ld;
    for (int64_t j = 0; j < columns; ++j) sums[j] += bf16_to_f32(values[j]);
  }
}

}  // namespace

void add_product(const RowTile& a,
                 const BFloat16* b,
                 int64_t depth,
                 int64_t rows,
                 int64_t columns,
                 float* c,
                 int64_t ldc) {
  if (has_register_tiles() && columns == kPanel) {
    matmul_add({.a = a.data, .lda = a.ld, .rows = rows, .b = b, .depth = depth, .columns = kPanel},
               c,
               ldc);
    return;
  }
  // The kernel reads c after its last multiply, from memory that nothing has touched for long.
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < columns; j += 16) __builtin_prefetch(c + r * ldc + j, /*rw=*/1);
  }
  if (rows == a.rows && columns == kPanel) {
    gemm_tile(a, b, depth, kPanel, /*add=*/true, c, ldc);
    return;
  }
  alignas(64) float tile[kRowTile * kPanel] = {};
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(tile + r * kPanel, c + r * ldc, sizeof(float) * columns);
  }
  gemm_tile(a, b, depth, kPanel, /*add=*/true, tile, kPanel);
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(c + r * ldc, tile + r * kPanel, sizeof(float) * columns);
  }
}

void add_column_sums(const BFloat16* dy, int64_t ld, int64_t rows, int64_t columns, float* sums) {
  at::parallel_for(0, divide_up(columns, kPanel), 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPanel;
    const int64_t last = std::min(columns, end * kPanel);
    sum_columns(
        reinterpret_cast<const uint16_t*>(dy) + first, ld, rows, last - first, sums + first);
  });
}

void weight_gradient(const BFloat16* dy,
                     int64_t ld_dy,
                     const BFloat16* x,
                     int64_t ld_x,
                     int64_t rows,
                     int64_t out,
                     int64_t in,
                     float* grad,
                     int64_t ld_grad) {
  thread_local Scratch dy_scratch;
  thread_local Scratch x_scratch;
  const int64_t row_tiles = divide_up(out, kRowTile);
  const int64_t panels = divide_up(in, kPanel);
  const int64_t chunks = divide_up(rows, kMostDepth);
  const int64_t most = chunks == 0 ? 0 : round_up(divide_up(rows, chunks), kDepthStep);
  BFloat16* dy_t = dy_scratch.get<BFloat16>(row_tiles * kRowTile * most);
  BFloat16* x_packed = x_scratch.get<BFloat16>(panels * kPanel * most);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t n = std::min(most, rows - first);
    const int64_t depth = round_up(n, kDepthStep);
    for_each_item(row_tiles + panels, [&](const auto& next) {
      for (int64_t i = next(); i >= 0; i = next()) {
        if (i < row_tiles) {
          const int64_t row = i * kRowTile;
          const int64_t width = std::min(kRowTile, out - row);
          BFloat16* to = dy_t + row * depth;
          transpose(dy + first * ld_dy + row, ld_dy, n, width, depth, to, depth);
          std::memset(static_cast<void*>(to + width * depth),
                      0,
                      sizeof(BFloat16) * (kRowTile - width) * depth);
        } else {
          const int64_t column = (i - row_tiles) * kPanel;
          const int64_t width = std::min(kPanel, in - column);
          pack_panel(x + first * ld_x + column, ld_x, n, width, depth, x_packed + column * depth);
        }
      }
    });
    // Nothing is compiled for register tiles, and whole panels take any number of rows in them.
    const bool registers = has_register_tiles();
    const int64_t product_depth = registers ? round_up(n, 2) : depth;
    for_each_item(divide_up(out, kBlockRows) * panels, [&](const auto& next) {
      for (int64_t item = next(); item >= 0; item = next()) {
        const int64_t first_row = item / panels * kBlockRows;
        const int64_t last_row = std::min(out, first_row + kBlockRows);
        const int64_t column = item % panels * kPanel;
        const int64_t width = std::min(kPanel, in - column);
        const int64_t step = registers && width == kPanel ? kBlockRows : kRowTile;
        for (int64_t row = first_row; row < last_row; row += step) {
          const int64_t height = std::min(step, last_row - row);
          add_product({dy_t + row * depth, depth, round_up(height, kRowStep)},
                      x_packed + column * depth,
                      product_depth,
                      height,
                      width,
                      grad + row * ld_grad + column,
                      ld_grad);
        }
      }
      gemm_release();
    });
  }
}

}  // namespace banyan::kernels
