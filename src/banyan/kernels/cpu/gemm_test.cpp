#include "banyan/kernels/cpu/gemm.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "banyan/kernels/cpu/bf16_product.h"
#include "banyan/kernels/cpu/matmul_block.h"

namespace banyan::kernels {
namespace {

std::vector<float> normal(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> draw;
  std::vector<float> values(count);
  for (float& v : values) v = draw(engine);
  return values;
}

std::vector<BFloat16> normal_bf16(int64_t count, uint32_t seed) {
  const std::vector<float> values = normal(count, seed);
  return {values.begin(), values.end()};
}

template <typename T>
bool same_bits(const T* a, const T* b, int64_t count) {
  return std::memcmp(a, b, sizeof(T) * count) == 0;
}

struct Shape {
  int64_t depth;
  int64_t columns;
};
const std::vector<Shape> kShapes = {{576, 192}, {576, 960}, {1536, 576}, {33, 70}, {8, 1}, {1, 64}};

TEST(GemmPack, BothFormsReadBackTheRoundedWeight) {
  for (const auto [in, out] : kShapes) {
    const std::vector<float> w = normal(out * in, 1);
    std::vector<BFloat16> packed(packed_size(in, out), BFloat16(7.0f));
    std::vector<BFloat16> packed_t(packed_size(out, in), BFloat16(7.0f));
    pack_weight(w.data(), out, in, packed.data());
    pack_weight_transposed(w.data(), out, in, packed_t.data());
    std::vector<BFloat16> row(in), row_t(in);
    for (int64_t r = 0; r < out; ++r) {
      unpack_row({packed.data(), in, out}, r, row.data());
      unpack_row_transposed({packed_t.data(), out, in}, r, row_t.data());
      for (int64_t k = 0; k < in; ++k) {
        ASSERT_EQ(row[k].x, BFloat16(w[r * in + k]).x)
            << in << "x" << out << " row " << r << " " << k;
        ASSERT_EQ(row_t[k].x, row[k].x);
      }
    }
    // Everything else is zero.
    double sum = 0, want = 0;
    for (const BFloat16 v : packed) sum += std::abs(static_cast<float>(v));
    for (const float v : w) want += std::abs(static_cast<float>(BFloat16(v)));
    EXPECT_NEAR(sum, want, 1e-9 * want);
  }
}

TEST(Gemm, EqualsTheDotProducts) {
  for (const auto [depth, columns] : kShapes) {
    const int64_t rows = 37;
    const std::vector<float> w = normal(columns * depth, 2);
    const std::vector<BFloat16> a = normal_bf16(rows * depth, 3);
    const std::vector<BFloat16> bias = normal_bf16(columns, 4);
    std::vector<BFloat16> packed(packed_size(depth, columns));
    pack_weight(w.data(), columns, depth, packed.data());
    const Panels b{packed.data(), depth, columns};
    std::vector<float> c(rows * columns);
    std::vector<BFloat16> rounded(rows * columns);
    gemm(a.data(), depth, rows, b, c.data(), columns);
    gemm(a.data(), depth, rows, b, bias.data(), rounded.data(), columns);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < columns; ++j) {
        double want = 0, size = 0;
        for (int64_t k = 0; k < depth; ++k) {
          const double term = double(a[r * depth + k]) * double(BFloat16(w[j * depth + k]));
          want += term;
          size += std::abs(term);
        }
        ASSERT_NEAR(c[r * columns + j], want, 1e-6 * size) << depth << "x" << columns;
        ASSERT_EQ(rounded[r * columns + j].x, BFloat16(c[r * columns + j] + float(bias[j])).x);
      }
    }
  }
}

// What follows the product is done in one pass, with the bits of the steps one after another.
TEST(Gemm, RoundsTheSumWithBiasAndResidual) {
  for (const auto [depth, columns] : kShapes) {
    for (const int64_t rows : {1, 5, 64, 67, 800}) {
      const std::vector<float> w = normal(columns * depth, 19);
      const std::vector<BFloat16> a = normal_bf16(rows * depth, 20);
      const std::vector<BFloat16> bias = normal_bf16(columns, 21);
      const std::vector<BFloat16> residual = normal_bf16(rows * columns, 22);
      std::vector<BFloat16> packed(packed_size(depth, columns));
      pack_weight(w.data(), columns, depth, packed.data());
      const Panels b{packed.data(), depth, columns};
      std::vector<float> c(rows * columns);
      gemm(a.data(), depth, rows, b, c.data(), columns);
      for (const bool with_bias : {false, true}) {
        for (const bool with_residual : {false, true}) {
          std::vector<BFloat16> got = residual;  // in place where there is one
          gemm(a.data(),
               depth,
               rows,
               b,
               with_bias ? bias.data() : nullptr,
               got.data(),
               columns,
               with_residual ? got.data() : nullptr);
          for (int64_t i = 0; i < rows * columns; ++i) {
            const float sum = with_bias ? c[i] + float(bias[i % columns]) : c[i];
            const BFloat16 rounded(sum);
            const BFloat16 want =
                with_residual ? BFloat16(float(rounded) + float(residual[i])) : rounded;
            ASSERT_EQ(got[i].x, want.x) << depth << "x" << columns << " " << rows << " at " << i;
          }
        }
      }
    }
  }
}

TEST(MatmulBlock, HasTheBitsOfTheTileKernel) {
  if (!bf16_product_available()) return;  // never called there
  const int64_t depth = 96, ldc = 80, ld = 200;
  const std::vector<BFloat16> b = normal_bf16(kPanel * depth, 24);
  for (const int64_t valid : {96, 77, 1}) {  // the depth of x; zeros from there on
    const std::vector<BFloat16> x = normal_bf16(valid * ld, 23);
    for (const int64_t columns : {32, 64}) {
      for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 11, 64, 97, 192, 200}) {
        std::vector<BFloat16> a(rows * depth),
            groups(divide_up(rows, kGroupRows) * group_stride(depth));
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t k = 0; k < valid; ++k) a[r * depth + k] = x[k * ld + r];
        }
        // In two parts of the depth, the first of them last.
        const int64_t cut = valid > 64 ? 64 : 0;
        pack_row_groups(
            x.data() + cut * ld, ld, valid - cut, rows, depth - cut, groups.data(), depth, cut);
        if (cut > 0) pack_row_groups(x.data(), ld, cut, rows, cut, groups.data(), depth, 0);
        std::vector<float> got(rows * ldc, 0.25f), want = got;
        matmul_add(
            {groups.data(), group_stride(depth), rows, b.data(), depth, columns}, got.data(), ldc);
        bf16_product({.a = a.data(),
                      .lda = depth,
                      .rows = rows,
                      .b = b.data(),
                      .ldb = kPanel,
                      .depth = depth,
                      .columns = columns,
                      .add = true,
                      .c = want.data(),
                      .ldc = ldc});
        EXPECT_TRUE(same_bits(got.data(), want.data(), rows * ldc))
            << columns << " " << rows << " " << valid;
      }
    }
  }
}

// The promise of decision 4: rows computed alone, in any number, at any place, under any thread
// count.
TEST(Gemm, RowBitsDependOnTheRowAlone) {
  const int threads = at::get_num_threads();
  for (const auto [depth, columns] : kShapes) {
    const int64_t most = 1000;
    const std::vector<float> w = normal(columns * depth, 5);
    const std::vector<BFloat16> a = normal_bf16(most * depth, 6);
    std::vector<BFloat16> packed(packed_size(depth, columns));
    pack_weight(w.data(), columns, depth, packed.data());
    const Panels b{packed.data(), depth, columns};
    std::vector<float> whole(most * columns);
    gemm(a.data(), depth, most, b, whole.data(), columns);
    for (const int64_t rows : {1, 2, 7, 16, 17, 63, 64, 65, 200}) {
      for (const int64_t first : {0L, 5L, most - rows}) {
        at::set_num_threads(first == 5 ? 1 : threads);
        std::vector<float> part(rows * columns);
        gemm(a.data() + first * depth, depth, rows, b, part.data(), columns);
        ASSERT_TRUE(same_bits(part.data(), whole.data() + first * columns, rows * columns))
            << rows << " rows from " << first << ", " << depth << "x" << columns;
      }
    }
  }
  at::set_num_threads(threads);
}

TEST(Gemm, NothingSpillsOverFromNeighbours) {
  const int64_t depth = 48, columns = 70, rows = 20;
  const std::vector<float> w = normal(columns * depth, 7);
  std::vector<BFloat16> a = normal_bf16(rows * depth, 8);
  std::vector<BFloat16> packed(packed_size(depth, columns));
  pack_weight(w.data(), columns, depth, packed.data());
  const Panels b{packed.data(), depth, columns};
  std::vector<float> clean(rows * columns), dirty(rows * columns);
  gemm(a.data(), depth, rows, b, clean.data(), columns);
  for (int64_t k = 0; k < depth; ++k) a[3 * depth + k] = BFloat16(NAN);
  gemm(a.data(), depth, rows, b, dirty.data(), columns);
  for (int64_t r = 0; r < rows; ++r) {
    if (r == 3) {
      EXPECT_TRUE(std::isnan(dirty[r * columns]));
    } else {
      EXPECT_TRUE(same_bits(&clean[r * columns], &dirty[r * columns], columns)) << r;
    }
  }
}

TEST(Gemm, PortableLoopEqualsTheNativeTile) {
  const int64_t depth = 576;
  const std::vector<BFloat16> a = normal_bf16(kRowTile * depth, 9);
  const std::vector<BFloat16> b = normal_bf16(kPanel * depth, 10);
  for (const bool add : {false, true}) {
    std::vector<float> got(kRowTile * kPanel, 0.5f), want(kRowTile * kPanel, 0.5f);
    gemm_tile({a.data(), depth, kRowTile}, b.data(), depth, kPanel, add, want.data(), kPanel);
    gemm_tile_portable(
        {a.data(), depth, kRowTile}, b.data(), depth, kPanel, add, got.data(), kPanel);
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 2e-4) << i;
    std::vector<float> part(kRowStep * kPanel, 0.5f);
    gemm_tile_portable(
        {a.data(), depth, kRowStep}, b.data(), depth, kPanel, add, part.data(), kPanel);
    EXPECT_TRUE(same_bits(part.data(), got.data(), kRowStep * kPanel));
  }
  EXPECT_STRNE(gemm_kernel_name(), "");
  EXPECT_EQ(native_gemm_available(), std::string(gemm_kernel_name()) != "portable loop");
}

// What training computed before there were register tiles, and computes with AMX nowhere else.
TEST(Gemm, RegisterTilesHaveTheBitsOfBrgemm) {
  if (!bf16_product_available()) return;  // the tile kernel is another one
  for (const int64_t depth : {2, 64, 128, 576, 1536}) {
    for (const int64_t columns : {16, 32, 64}) {
      const std::vector<BFloat16> a = normal_bf16(kRowTile * depth, 15);
      const std::vector<BFloat16> b = normal_bf16(kPanel * depth, 16);
      for (const bool add : {false, true}) {
        std::vector<float> wanted(kRowTile * kPanel, 0.25f);
        at::native::cpublas::brgemm(kRowTile,
                                    columns,
                                    depth,
                                    depth,
                                    kPanel,
                                    kPanel,
                                    add,
                                    a.data(),
                                    b.data(),
                                    wanted.data(),
                                    /*is_vnni=*/true);
        for (const int64_t rows : {1, 2, 3, 5, 6, 7, 13, 64}) {
          std::vector<float> got(kRowTile * kPanel, 0.25f);
          bf16_product({.a = a.data(),
                        .lda = depth,
                        .rows = rows,
                        .b = b.data(),
                        .ldb = kPanel,
                        .depth = depth,
                        .columns = columns,
                        .add = add,
                        .c = got.data(),
                        .ldc = kPanel,
                        .ahead = b.data(),
                        .ahead_bytes = static_cast<int64_t>(b.size() * sizeof(BFloat16))});
          for (int64_t r = 0; r < kRowTile; ++r) {
            for (int64_t j = 0; j < kPanel; ++j) {
              const bool computed = r < rows && j < columns;
              ASSERT_EQ(got[r * kPanel + j], computed ? wanted[r * kPanel + j] : 0.25f)
                  << depth << ' ' << columns << ' ' << rows << " at " << r << ' ' << j;
            }
          }
        }
      }
    }
  }
  at::native::cpublas::brgemm_release(/*is_vnni=*/true);
}

TEST(Gemm, RegisterTilesTakeAnyNumberOfColumns) {
  if (!bf16_product_available()) return;
  const int64_t depth = 48, rows = 8, ldb = 80;
  const std::vector<BFloat16> a = normal_bf16(rows * depth, 17);
  const std::vector<BFloat16> b = normal_bf16(ldb * depth, 18);
  for (const int64_t columns : {1, 15, 24, 64, 65, 80}) {
    std::vector<float> got(rows * ldb, 0.25f);
    bf16_product({.a = a.data(),
                  .lda = depth,
                  .rows = rows,
                  .b = b.data(),
                  .ldb = ldb,
                  .depth = depth,
                  .columns = columns,
                  .add = true,
                  .c = got.data(),
                  .ldc = ldb});
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < ldb; ++j) {
        double want = 0.25;
        for (int64_t k = 0; k < depth && j < columns; ++k) {
          want += double(a[r * depth + k]) * double(b[k / 2 * 2 * ldb + 2 * j + k % 2]);
        }
        ASSERT_NEAR(got[r * ldb + j], want, 1e-4) << columns << " at " << r << ' ' << j;
      }
    }
  }
}

TEST(WeightGradient, EqualsTheSumAndDoesNotDependOnThreads) {
  const int threads = at::get_num_threads();
  for (const auto [in, out] : kShapes) {
    // Rows stand further apart than they are long.
    const int64_t ld_dy = out + 6, ld_x = in + 10, ld_grad = in + 2;
    for (const int64_t rows : {0, 1, 63, 600, 1300}) {
      const std::vector<BFloat16> dy = normal_bf16(rows * ld_dy, 11);
      const std::vector<BFloat16> x = normal_bf16(rows * ld_x, 12);
      const std::vector<float> start = normal(out * ld_grad, 13);
      const auto gradient = [&] {
        std::vector<float> grad = start;
        weight_gradient(dy.data(), ld_dy, x.data(), ld_x, rows, out, in, grad.data(), ld_grad);
        return grad;
      };
      const std::vector<float> grad = gradient();
      for (const int num_threads : {1, 2, 3, 5}) {
        at::set_num_threads(num_threads);
        const std::vector<float> again = gradient();
        ASSERT_TRUE(same_bits(grad.data(), again.data(), out * ld_grad))
            << in << "x" << out << " " << rows << " over " << num_threads;
      }
      at::set_num_threads(threads);
      for (int64_t i = 0; i < out * ld_grad; i += 97) {
        const int64_t row = i / ld_grad, column = i % ld_grad;
        double want = start[i], size = std::abs(want);
        for (int64_t t = 0; t < rows && column < in; ++t) {
          const double term = double(dy[t * ld_dy + row]) * double(x[t * ld_x + column]);
          want += term;
          size += std::abs(term);
        }
        ASSERT_NEAR(grad[i], want, 1e-6 * size) << in << "x" << out << " " << rows << " at " << i;
      }
    }
  }
}

TEST(WeightGradient, ColumnSumsInRowOrder) {
  const int64_t rows = 300, columns = 70;
  const std::vector<BFloat16> dy = normal_bf16(rows * columns, 14);
  std::vector<float> sums(columns, 1.0f);
  add_column_sums(dy.data(), columns, rows, columns, sums.data());
  for (int64_t j = 0; j < columns; ++j) {
    float want = 1.0f;
    for (int64_t t = 0; t < rows; ++t) want += float(dy[t * columns + j]);
    EXPECT_EQ(sums[j], want);
  }
}

}  // namespace
}  // namespace banyan::kernels
