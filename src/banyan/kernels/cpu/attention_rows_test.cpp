// Fused rows have the bits of the separate steps, on random shapes and paths.
#include "banyan/kernels/cpu/attention_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "banyan/kernels/cpu/attention.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {
namespace {

struct Case {
  int64_t heads, kv_heads, dim, tokens;
};

TEST(AttentionRows, HaveTheBitsOfTheSeparateSteps) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const Case& c : std::vector<Case>{
           {9, 3, 64, 1}, {9, 3, 64, 40}, {4, 4, 128, 23}, {14, 2, 16, 9}, {8, 1, 96, 5}}) {
    constexpr int32_t kTiles = 7;
    const int64_t size = tile_elements(c.dim);
    std::vector<uint16_t> tiles(kTiles * c.kv_heads * size);
    for (uint16_t& v : tiles) v = f32_to_bf16(normal(random));
    std::vector<uint16_t> q(c.tokens * c.heads * c.dim);
    for (uint16_t& v : q) v = f32_to_bf16(2.0f * normal(random));
    // Paths of up to 3 tiles; neighbours often share the first ones.
    std::vector<std::vector<int32_t>> paths(c.tokens);
    std::vector<const int32_t*> lists;
    std::vector<int32_t> visible, runs;
    for (int64_t t = 0; t < c.tokens; ++t) {
      paths[t] = {0, static_cast<int32_t>(1 + t / 8 % 2), static_cast<int32_t>(3 + random() % 4)};
      lists.push_back(paths[t].data());
      visible.push_back(1 + static_cast<int32_t>(random() % (3 * kTileTokens)));
      runs.push_back(static_cast<int32_t>(t));
    }
    AttendInput input{.shape = {.num_heads = c.heads,
                                .num_kv_heads = c.kv_heads,
                                .head_dim = c.dim,
                                .scale = 1.0f / std::sqrt(static_cast<float>(c.dim))},
                      .num_tokens = c.tokens,
                      .q = q.data(),
                      .q_stride = c.heads * c.dim,
                      .tiles = tiles.data(),
                      .tile_lists = lists.data(),
                      .visible = visible.data(),
                      .fused = false};
    std::vector<uint16_t> wanted(q.size()), got(q.size());
    std::vector<float> wanted_lse(c.tokens * c.heads), lse(c.tokens * c.heads);
    attend(input, wanted.data(), wanted_lse.data());
    for (const bool fused : {false, true}) {
      for (const bool grouped : {false, true}) {
        input.fused = fused;
        input.runs = grouped ? nullptr : runs.data();
        std::fill(got.begin(), got.end(), 0);
        attend(input, got.data(), lse.data());
        EXPECT_EQ(got, wanted) << c.dim << " fused " << fused << " grouped " << grouped;
        EXPECT_EQ(lse, wanted_lse) << c.dim << " fused " << fused << " grouped " << grouped;
      }
    }
  }
}

}  // namespace
}  // namespace banyan::kernels
