// dW += dyᵀ x. Per chunk of rows: x is packed over its rows, then each pack of columns of dy, which
// stays in the second-level cache of the thread that packs it, is multiplied with the panels of x,
// and the products are added straight into the fp32 gradient. Chunks are as few and as equal as
// kMostDepth allows, since each costs one reading and writing of dW; the last one is filled with
// zero rows. So the order of a sum depends on the number of rows alone.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/matmul_block.h"
#include "banyan/kernels/cpu/vecmath.h"
#include "banyan/kernels/cpu/work_items.h"

namespace banyan::kernels {

namespace {

constexpr int64_t kMostDepth =
    1280;                           // a pack of dy and a panel of x stand in the second-level cache
constexpr int64_t kDepthStep = 64;  // few depths, so few kernels are compiled at run time

// Who multiplies what: whole packs of rows of dW with all panels, as many as the threads share
// evenly, then the packs that are left, each cut by panels into as many equal parts as it takes,
// but of two panels at least, since each part packs for itself.
class PackShares {
 public:
  PackShares(int64_t packs, int64_t panels) : panels_(panels) {
    const int64_t threads = at::get_num_threads();
    whole_ = packs / threads * threads;
    left_ = packs - whole_;
    if (left_ > 0) {
      parts_ = std::min(divide_up(panels, 2), threads / std::gcd(left_, threads));
    }
  }

  struct Share {
    int64_t pack, first_panel, last_panel;
  };
  int64_t count() const { return whole_ + left_ * parts_; }
  Share at(int64_t item) const {
    if (item < whole_) return {item, 0, panels_};
    const int64_t part = (item - whole_) % parts_;
    return {
        whole_ + (item - whole_) / parts_, part * panels_ / parts_, (part + 1) * panels_ / parts_};
  }

 private:
  int64_t panels_;
  int64_t whole_ = 0;
  int64_t left_ = 0;
  int64_t parts_ = 1;
};

BANYAN_MULTIVERSION
void sum_columns(const uint16_t* dy, int64_t ld, int64_t rows, int64_t columns, float* sums) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t* values = dy + row * ld;
    for (int64_t j = 0; j < columns; ++j) sums[j] += bf16_to_f32(values[j]);
  }
}

}  // namespace

int64_t packed_rows_offset(int64_t row, int64_t whole) {
  return has_register_tiles() ? divide_up(row, kGroupRows) * group_stride(whole)
                              : round_up(row, kRowStep) * whole;
}

void pack_transposed_rows(const BFloat16* x,
                          int64_t ld,
                          int64_t depth,
                          int64_t rows,
                          int64_t padded_depth,
                          BFloat16* out,
                          int64_t whole,
                          int64_t first) {
  if (has_register_tiles()) {
    pack_row_groups(x, ld, depth, rows, padded_depth, out, whole, first);
    return;
  }
  transpose(x, ld, depth, rows, padded_depth, out + first, whole);
  for (int64_t row = rows; row < round_up(rows, kRowStep); ++row) {
    std::memset(static_cast<void*>(out + row * whole + first), 0, sizeof(BFloat16) * padded_depth);
  }
}

void add_product(const BFloat16* a,
                 int64_t whole,
                 const BFloat16* b,
                 int64_t depth,
                 int64_t rows,
                 int64_t columns,
                 float* c,
                 int64_t ldc) {
  const bool registers = has_register_tiles();
  const int64_t most_rows = registers ? kRowTile / kGroupRows * kGroupRows : kRowTile;
  for (int64_t row = 0; row < rows; row += most_rows) {
    const int64_t height = std::min(most_rows, rows - row);
    const BFloat16* from = a + packed_rows_offset(row, whole);
    const auto add = [&](float* to, int64_t ld) {
      if (registers) {
        matmul_add({.a = from,
                    .lda = group_stride(whole),
                    .rows = height,
                    .b = b,
                    .depth = depth,
                    .columns = kPanel},
                   to,
                   ld);
      } else {
        const RowTile padded{from, whole, round_up(height, kRowStep)};
        gemm_tile(padded, b, depth, kPanel, /*add=*/true, to, ld);
      }
    };
    float* to = c + row * ldc;
    if (columns == kPanel && (registers || height % kRowStep == 0)) {
      // brgemm reads c after its last multiply, from memory that nothing has touched for long.
      for (int64_t r = 0; r < height && !registers; ++r) {
        for (int64_t j = 0; j < columns; j += 16) __builtin_prefetch(to + r * ldc + j, /*rw=*/1);
      }
      add(to, ldc);
      continue;
    }
    alignas(64) float tile[kRowTile * kPanel] = {};
    for (int64_t r = 0; r < height; ++r) {
      std::memcpy(tile + r * kPanel, to + r * ldc, sizeof(float) * columns);
    }
    add(tile, kPanel);
    for (int64_t r = 0; r < height; ++r) {
      std::memcpy(to + r * ldc, tile + r * kPanel, sizeof(float) * columns);
    }
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
  thread_local Scratch x_scratch;
  const int64_t panels = divide_up(in, kPanel);
  const int64_t chunks = divide_up(rows, kMostDepth);
  const int64_t most = chunks == 0 ? 0 : round_up(divide_up(rows, chunks), kDepthStep);
  const PackShares shares(divide_up(out, kPackRows), panels);
  BFloat16* x_packed = x_scratch.get<BFloat16>(panels * panel_stride(most));
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t n = std::min(most, rows - first);
    const int64_t depth = round_up(n, kDepthStep);
    const int64_t x_stride = panel_stride(depth);
    for_each_item(depth / kDepthStep, [&](const auto& next) {
      for (int64_t i = next(); i >= 0; i = next()) {
        const int64_t at = i * kDepthStep;
        const int64_t height = std::min(kDepthStep, n - at);
        pack_panels(x + (first + at) * ld_x, ld_x, height, in, kDepthStep, x_packed, x_stride, at);
      }
    });
    // Nothing is compiled for register tiles, which so take any depth.
    const int64_t product_depth = has_register_tiles() ? round_up(n, 2) : depth;
    for_each_item(shares.count(), [&](const auto& next) {
      thread_local Scratch dy_scratch;
      BFloat16* dy_packed = dy_scratch.get<BFloat16>(packed_rows_offset(kPackRows, depth));
      for (int64_t item = next(); item >= 0; item = next()) {
        const PackShares::Share share = shares.at(item);
        const int64_t row = share.pack * kPackRows;
        const int64_t height = std::min(kPackRows, out - row);
        pack_transposed_rows(dy + first * ld_dy + row, ld_dy, n, height, depth, dy_packed, depth);
        for (int64_t panel = share.first_panel; panel < share.last_panel; ++panel) {
          const int64_t column = panel * kPanel;
          add_product(dy_packed,
                      depth,
                      x_packed + panel * x_stride,
                      product_depth,
                      height,
                      std::min(kPanel, in - column),
                      grad + row * ld_grad + column,
                      ld_grad);
        }
      }
      gemm_release();
    });
  }
}

}  // namespace banyan::kernels
