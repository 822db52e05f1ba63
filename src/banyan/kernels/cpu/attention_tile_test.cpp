// Layouts of attention tiles, and the small product over them.
#include "banyan/kernels/cpu/attention_tile.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {
namespace {

struct Rows {
  Rows(int64_t n, int64_t dim) : values(n * dim) {
    for (int64_t i = 0; i < n * dim; ++i) {
      values[i] = f32_to_bf16(std::sin(0.37f * static_cast<float>(i)));
    }
    for (int64_t i = 0; i < n; ++i) pointers.push_back(values.data() + i * dim);
  }
  std::vector<uint16_t> values;
  std::vector<const uint16_t*> pointers;
};

TEST(AttentionTile, PacksColumnsAndPairs) {
  for (const int64_t dim : {2, 10, 16, 64, 72}) {
    for (const int64_t width : {16, 48, 64}) {
      for (const int64_t n : {int64_t{0}, int64_t{1}, width - 7, width}) {
        const Rows rows(n, dim);
        std::vector<uint16_t> columns(dim * width, 7);
        std::vector<uint16_t> pairs(dim * width, 7);
        pack_columns(rows.pointers.data(), n, width, dim, columns.data());
        pack_pairs(rows.pointers.data(), n, width, dim, pairs.data());
        for (int64_t p = 0; p < width; ++p) {
          for (int64_t d = 0; d < dim; ++d) {
            const uint16_t wanted = p < n ? rows.pointers[p][d] : 0;
            ASSERT_EQ(columns[d / 2 * 2 * width + 2 * p + d % 2], wanted) << p << ' ' << d;
            ASSERT_EQ(pairs[p / 2 * 2 * dim + 2 * d + p % 2], wanted) << p << ' ' << d;
          }
        }
      }
    }
  }
}

TEST(AttentionTile, PositionsWrittenOneByOneGiveThePackedTile) {
  constexpr int64_t kDim = 24;
  const Rows keys(kTileTokens, kDim);
  const Rows values(kTileTokens, kDim);
  for (const int64_t n : {1, 2, 31, 64}) {
    std::vector<uint16_t> wanted(tile_elements(kDim));
    pack_columns(keys.pointers.data(), n, kTileTokens, kDim, wanted.data());
    pack_pairs(values.pointers.data(), n, kTileTokens, kDim, wanted.data() + kTileTokens * kDim);
    std::vector<uint16_t> got(tile_elements(kDim), 0x7fc0);  // NaN of an earlier owner
    for (int64_t p = 0; p < n; ++p) {
      write_position(keys.pointers[p], values.pointers[p], p, kDim, got.data());
    }
    for (int64_t i = 0; i < tile_elements(kDim); ++i) {
      const bool key = i < kTileTokens * kDim;
      if (key && i % (2 * kTileTokens) / 2 >= n) continue;  // keys beyond are masked, not read
      ASSERT_EQ(got[i], wanted[i]) << i;
    }
  }
}

TEST(AttentionTile, ProductEqualsThePortableLoopAndNeighboursDoNotMatter) {
  for (const int64_t dim : {8, 16, 64}) {
    const Rows a(96, dim);
    const Rows b(kTileTokens, dim);
    std::vector<uint16_t> packed(dim * kTileTokens);
    pack_columns(b.pointers.data(), kTileTokens, kTileTokens, dim, packed.data());
    std::vector<float> all(96 * kTileTokens, 1.0f);
    std::vector<float> portable(96 * kTileTokens, 1.0f);
    TileGemm whole{.m = 96,
                   .n = kTileTokens,
                   .k = dim,
                   .accumulate = true,
                   .a = a.values.data(),
                   .lda = dim,
                   .b = packed.data(),
                   .c = all.data(),
                   .ld = kTileTokens};
    tile_gemm(whole);
    whole.c = portable.data();
    tile_gemm_portable(whole);
    for (size_t i = 0; i < all.size(); ++i) ASSERT_NEAR(all[i], portable[i], 1e-4);
    for (const int64_t rows : {padded_rows(1), padded_rows(7), padded_rows(16), padded_rows(40)}) {
      for (const int64_t columns : {16, 40, 48, 64}) {
        std::vector<float> some(rows * kTileTokens, 1.0f);
        TileGemm part = whole;
        part.m = rows;
        part.n = padded_columns(columns, kTileTokens);
        part.c = some.data();
        tile_gemm(part);
        for (int64_t i = 0; i < rows * kTileTokens; ++i) {
          const bool computed = i % kTileTokens < part.n;
          ASSERT_EQ(some[i], computed ? all[i] : 1.0f) << rows << 'x' << columns << ' ' << i;
        }
      }
    }
  }
}

TEST(AttentionTile, RowCountsAreRoundedUp) {
  EXPECT_GE(padded_rows(3), 3);
  EXPECT_LE(padded_rows(3), 16);
  EXPECT_EQ(padded_rows(16), 16);
  EXPECT_GE(padded_rows(17), 17);
  EXPECT_LE(padded_rows(17), 32);
  EXPECT_EQ(padded_rows(96), 96);
}

}  // namespace
}  // namespace banyan::kernels
