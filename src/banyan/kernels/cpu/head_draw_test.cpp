// Folded draws: the bits of stored logits and of scoring, the right law, and rows on their own.
#include "banyan/kernels/cpu/head_draw.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace banyan::kernels {
namespace {

struct Head {
  Head(int64_t rows, int64_t width, int64_t vocabulary, uint32_t seed)
      : rows(rows), width(width), vocabulary(vocabulary), hidden(rows * width) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> w(vocabulary * width);
    for (float& v : w) v = 0.3f * normal(random);
    for (BFloat16& v : hidden) v = BFloat16(normal(random));
    packed.resize(packed_size(width, vocabulary));
    pack_weight(w.data(), vocabulary, width, packed.data());
  }

  Panels weight() const { return {packed.data(), width, vocabulary}; }

  std::vector<float> logits() const {
    std::vector<float> z(rows * vocabulary);
    gemm(hidden.data(), width, rows, weight(), z.data(), vocabulary);
    return z;
  }

  int64_t rows, width, vocabulary;
  std::vector<BFloat16> hidden;
  std::vector<BFloat16> packed;
};

struct Draws {
  std::vector<float> inverse;
  std::vector<uint8_t> greedy;
  std::vector<int32_t> offsets = {0};
  std::vector<float> uniform;
  std::vector<int32_t> token;
  std::vector<float> logprob;
  std::vector<float> raw;
};

// 0 to 3 draws a row; temperatures 1, 0.7, 2 and greedy in turn.
Draws draws_of(int64_t rows) {
  Draws d;
  std::mt19937 random(3);
  for (int64_t r = 0; r < rows; ++r) {
    d.greedy.push_back(r % 4 == 3);
    d.inverse.push_back(r % 4 == 1 ? 1.0f / 0.7f : r % 4 == 2 ? 0.5f : 1.0f);
    for (int64_t i = 0; i < (r * 5 + 1) % 4; ++i) {
      d.uniform.push_back(static_cast<float>(random() >> 8) * 0x1p-24f);
    }
    d.offsets.push_back(static_cast<int32_t>(d.uniform.size()));
  }
  d.token.resize(d.uniform.size());
  d.logprob.resize(d.uniform.size());
  d.raw.resize(d.uniform.size());
  return d;
}

void run(const Head& head, Draws& d) {
  head_draw({.hidden = head.hidden.data(),
             .ld_hidden = head.width,
             .rows = head.rows,
             .weight = head.weight(),
             .inverse_temperature = d.inverse.data(),
             .greedy = d.greedy.data(),
             .row_offsets = d.offsets.data(),
             .uniform = d.uniform.data()},
            {.token = d.token.data(), .logprob = d.logprob.data(), .raw = d.raw.data()});
}

TEST(HeadDraw, EqualsDrawsFromStoredLogitsAndScoring) {
  const int threads = at::get_num_threads();
  for (const auto [rows, width, vocabulary] :
       std::vector<std::array<int64_t, 3>>{{1, 64, 300}, {67, 33, 5000}, {130, 16, 4096 + 257}}) {
    const Head head(rows, width, vocabulary, 1);
    const std::vector<float> z = head.logits();
    Draws d = draws_of(rows);
    run(head, d);
    at::set_num_threads(1);
    Draws alone = draws_of(rows);
    run(head, alone);
    at::set_num_threads(threads);
    EXPECT_EQ(d.token, alone.token);
    EXPECT_EQ(d.logprob, alone.logprob);
    EXPECT_EQ(d.raw, alone.raw);
    std::vector<TileMass> masses(vocab_tiles(vocabulary));
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = z.data() + r * vocabulary;
      const RowLaw law = row_law(row, vocabulary, d.inverse[r], masses.data());
      ASSERT_TRUE(law.finite());
      for (int32_t i = d.offsets[r]; i < d.offsets[r + 1]; ++i) {
        TilePick pick;
        if (d.greedy[r]) {
          pick.tile = largest_tile(law, masses.data(), vocabulary);
        } else {
          pick = pick_tile(law, masses.data(), vocabulary, d.uniform[i]);
        }
        const int64_t first = pick.tile * kVocabTile;
        const int64_t count = std::min(kVocabTile, vocabulary - first);
        const int64_t chosen = d.greedy[r]
                                   ? largest_in_tile(law, row + first, count, d.inverse[r])
                                   : pick_in_tile(law, pick, row + first, count, d.inverse[r]);
        ASSERT_EQ(d.token[i], first + chosen) << "row " << r;
        if (d.greedy[r]) {
          ASSERT_EQ(d.token[i], std::max_element(row, row + vocabulary) - row);
        }
        float logprob = 0.0f, raw = 0.0f;
        logits_logprob(row, 1, vocabulary, &d.token[i], d.inverse[r], &logprob);
        logits_logprob(row, 1, vocabulary, &d.token[i], 1.0f, &raw);
        ASSERT_EQ(d.logprob[i], logprob) << "row " << r;
        ASSERT_EQ(d.raw[i], raw) << "row " << r;
      }
    }
  }
}

TEST(HeadDraw, RowsDoNotKnowOfOneAnother) {
  const Head head(40, 48, 700, 2);
  Draws all = draws_of(40);
  run(head, all);
  for (const int64_t row : {1, 17, 39}) {
    Head one(1, 48, 700, 2);
    one.packed = head.packed;
    one.hidden.assign(head.hidden.begin() + row * 48, head.hidden.begin() + (row + 1) * 48);
    Draws d;
    d.inverse = {all.inverse[row]};
    d.greedy = {all.greedy[row]};
    d.uniform.assign(all.uniform.begin() + all.offsets[row],
                     all.uniform.begin() + all.offsets[row + 1]);
    d.offsets = {0, static_cast<int32_t>(d.uniform.size())};
    d.token.resize(d.uniform.size());
    d.logprob.resize(d.uniform.size());
    d.raw.resize(d.uniform.size());
    run(one, d);
    for (size_t i = 0; i < d.token.size(); ++i) {
      EXPECT_EQ(d.token[i], all.token[all.offsets[row] + i]);
      EXPECT_EQ(d.logprob[i], all.logprob[all.offsets[row] + i]);
    }
  }
}

// Pearson's statistic over the tokens, in standard deviations from its mean.
TEST(HeadDraw, FrequenciesFollowTheSoftmax) {
  const int64_t vocabulary = 700;
  const Head head(1, 16, vocabulary, 4);
  const std::vector<float> z = head.logits();
  constexpr int kDraws = 60000;
  std::mt19937 random(7);
  Draws d;
  d.inverse = {1.0f / 0.8f};
  d.greedy = {0};
  for (int i = 0; i < kDraws; ++i)
    d.uniform.push_back(static_cast<float>(random() >> 8) * 0x1p-24f);
  d.offsets = {0, kDraws};
  d.token.resize(kDraws);
  d.logprob.resize(kDraws);
  d.raw.resize(kDraws);
  run(head, d);
  std::vector<double> p(vocabulary), count(vocabulary, 0.0);
  double sum = 0.0;
  for (int64_t v = 0; v < vocabulary; ++v) sum += p[v] = std::exp(z[v] / 0.8);
  for (const int32_t token : d.token) ++count[token];
  double statistic = 0.0, rest_p = 0.0, rest_count = 0.0;
  int cells = 0;
  for (int64_t v = 0; v < vocabulary; ++v) {
    const double expected = kDraws * p[v] / sum;
    if (expected < 5.0) {
      rest_p += expected;
      rest_count += count[v];
      continue;
    }
    statistic += (count[v] - expected) * (count[v] - expected) / expected;
    ++cells;
  }
  if (rest_p > 0.0) statistic += (rest_count - rest_p) * (rest_count - rest_p) / rest_p;
  const double freedom = cells - (rest_p > 0.0 ? 0.0 : 1.0);
  EXPECT_LT(std::abs(statistic - freedom) / std::sqrt(2.0 * freedom), 4.0);
}

TEST(HeadDraw, EndsOfTheUniformRange) {
  const Head head(1, 16, 700, 5);
  Draws d;
  d.inverse = {1.0f};
  d.greedy = {0};
  d.uniform = {0.0f, 1.0f - 0x1p-24f};
  d.offsets = {0, 2};
  d.token.resize(2);
  d.logprob.resize(2);
  d.raw.resize(2);
  run(head, d);
  EXPECT_EQ(d.token[0], 0);
  EXPECT_GE(d.token[1], 690);
  EXPECT_LT(d.token[1], 700);
}

TEST(HeadDraw, ABrokenRowSaysSoAndLeavesTheOthersAlone) {
  Head head(5, 32, 600, 6);
  Draws wanted = draws_of(5);
  run(head, wanted);
  for (const float broken : {NAN, INFINITY}) {
    Head other = head;
    for (int64_t k = 0; k < 32; ++k) other.hidden[2 * 32 + k] = BFloat16(broken);
    Draws d = draws_of(5);
    run(other, d);
    for (int64_t r = 0; r < 5; ++r) {
      for (int32_t i = d.offsets[r]; i < d.offsets[r + 1]; ++i) {
        EXPECT_EQ(d.token[i], r == 2 ? -1 : wanted.token[i]);
      }
    }
  }
  // Logits of -inf have no mass; a row of nothing else is broken.
  std::vector<float> z(600, -INFINITY);
  std::vector<TileMass> masses(vocab_tiles(600));
  EXPECT_FALSE(row_law(z.data(), 600, 1.0f, masses.data()).finite());
  z[511] = -3.0f;
  const RowLaw law = row_law(z.data(), 600, 1.0f, masses.data());
  ASSERT_TRUE(law.finite());
  const TilePick pick = pick_tile(law, masses.data(), 600, 0.5f);
  EXPECT_EQ(pick.tile, 1);
  EXPECT_EQ(pick_in_tile(law, pick, z.data() + 256, 256, 1.0f), 255);
  EXPECT_EQ(largest_tile(law, masses.data(), 600), 1);
}

}  // namespace
}  // namespace banyan::kernels
