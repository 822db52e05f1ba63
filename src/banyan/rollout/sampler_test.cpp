#include "banyan/rollout/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "banyan/core/rng.h"

namespace banyan::rollout {
namespace {

std::vector<float> random_logits(int32_t vocab, float spread, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> z(vocab);
  for (float& value : z) value = normal(random);
  return z;
}

// Probabilities after T, top-k and top-p, by sorting the whole vocabulary in double.
std::vector<double> exact(const std::vector<float>& z, const SamplerOptions& options) {
  std::vector<int32_t> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return z[a] > z[b]; });
  if (options.top_k > 0 && options.top_k < static_cast<int32_t>(order.size())) {
    order.resize(options.top_k);
  }
  std::vector<double> mass;
  for (const int32_t id : order) {
    mass.push_back(std::exp((double{z[id]} - double{z[order[0]]}) / options.temperature));
  }
  const double total = std::accumulate(mass.begin(), mass.end(), 0.0);
  double kept = 0.0;
  size_t count = 0;
  while (count < mass.size() && (count == 0 || kept < options.top_p * total)) {
    kept += mass[count++];
  }
  std::vector<double> p(z.size(), 0.0);
  for (size_t i = 0; i < count; ++i) p[order[i]] = mass[i] / kept;
  return p;
}

// Pearson's statistic over tokens expected at least 5 times (the rest pooled), in standard
// deviations.
double chi_square_sigmas(const std::vector<float>& z, const SamplerOptions& options, int draws) {
  const std::vector<double> p = exact(z, options);
  Sampler sampler(options, static_cast<int32_t>(z.size()));
  EXPECT_TRUE(sampler.load(z.data()));
  std::vector<int64_t> count(z.size(), 0);
  for (int i = 0; i < draws; ++i) {
    ++count[sampler.draw(uniform(NoiseKey{.seed = 9}, static_cast<uint64_t>(i)))];
  }
  double statistic = 0.0;
  double pooled_p = 0.0;
  int64_t pooled_count = 0;
  int cells = -1;
  for (size_t id = 0; id < z.size(); ++id) {
    EXPECT_TRUE(p[id] > 0.0 || count[id] == 0) << "drew a token that was cut: " << id;
    if (p[id] * draws < 5) {
      pooled_p += p[id];
      pooled_count += count[id];
      continue;
    }
    const double expected = p[id] * draws;
    statistic += (count[id] - expected) * (count[id] - expected) / expected;
    ++cells;
  }
  if (pooled_p * draws >= 5) {
    const double expected = pooled_p * draws;
    statistic += (pooled_count - expected) * (pooled_count - expected) / expected;
    ++cells;
  }
  return cells > 0 ? (statistic - cells) / std::sqrt(2.0 * cells) : 0.0;
}

TEST(Sampler, DrawsFollowTheExactDistribution) {
  const std::vector<SamplerOptions> cases = {
      {.temperature = 1.0},
      {.temperature = 0.5},
      {.temperature = 2.0},
      {.temperature = 1.0, .top_p = 0.9},
      {.temperature = 0.7, .top_p = 0.5},
      {.temperature = 1.0, .top_p = 1.0, .top_k = 5},
      {.temperature = 1.0, .top_p = 0.8, .top_k = 20},
      {.temperature = 1.5, .top_p = 0.95, .top_k = 600},
  };
  for (const int32_t vocab : {7, 300, 1000}) {
    const std::vector<float> z = random_logits(vocab, 2.0f, 11);
    for (const SamplerOptions& options : cases) {
      EXPECT_LT(chi_square_sigmas(z, options, 40000), 4.5)
          << "vocab " << vocab << " T " << options.temperature << " top_p " << options.top_p
          << " top_k " << options.top_k;
    }
  }
}

TEST(Sampler, CutsEqualASortOfTheVocabulary) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    const int32_t vocab = 1 + static_cast<int32_t>(seed * 97 % 3000);
    std::vector<float> z = random_logits(vocab, seed % 2 ? 0.05f : 3.0f, seed);
    for (size_t i = 0; i < z.size(); i += 3) z[i] = z[i / 2];  // ties
    for (const int32_t k : {-1, 1, 2, 40, 700}) {
      for (const double p : {1.0, 0.999, 0.6, 0.01}) {
        const SamplerOptions options{.temperature = 0.8, .top_p = p, .top_k = k};
        const std::vector<double> probability = exact(z, options);
        const int64_t wanted = std::count_if(
            probability.begin(), probability.end(), [](double value) { return value > 0.0; });
        const float max = *std::max_element(z.begin(), z.end());
        TruncationScratch scratch;
        Cut cut;
        if (k > 0) cut = top_k_cut(z.data(), vocab, k, scratch);
        if (p < 1.0) cut = top_p_cut(z.data(), vocab, cut, max, 1.0f / 0.8f, p, scratch);
        int64_t got = 0;
        bool inside = true;
        for (int32_t id = 0; id < vocab; ++id) {
          if (!survives(cut, z[id], id)) continue;
          ++got;
          inside &= probability[id] > 0.0 || p < 1.0;
        }
        // The sums are fp32 against double: a token at the very border may fall on either side.
        EXPECT_NEAR(got, wanted, p < 1.0 ? 1 : 0) << "vocab " << vocab << " k " << k << " p " << p;
        EXPECT_TRUE(inside);
      }
    }
  }
}

TEST(Sampler, GreedyAndTopOneTakeTheLowestIdOfTheLargest) {
  std::vector<float> z = random_logits(500, 1.0f, 3);
  z[123] = z[321] = 9.0f;
  for (const SamplerOptions& options :
       {SamplerOptions{.temperature = 0.0},
        SamplerOptions{.temperature = 9e-6},
        SamplerOptions{.temperature = 1.0, .top_p = 1.0, .top_k = 1},
        SamplerOptions{.temperature = 1.0, .top_p = 1e-9}}) {
    Sampler sampler(options, 500);
    ASSERT_TRUE(sampler.load(z.data()));
    for (const float u : {0.0f, 0.3f, 0.99999994f}) EXPECT_EQ(sampler.draw(u), 123);
  }
}

TEST(Sampler, InvertsTheCumulativeDistributionInIdOrder) {
  const std::vector<float> z = {std::log(0.2f), std::log(0.5f), std::log(0.3f)};
  Sampler sampler({}, 3);
  ASSERT_TRUE(sampler.load(z.data()));
  EXPECT_EQ(sampler.draw(0.0f), 0);
  EXPECT_EQ(sampler.draw(0.199f), 0);
  EXPECT_EQ(sampler.draw(0.201f), 1);
  EXPECT_EQ(sampler.draw(0.699f), 1);
  EXPECT_EQ(sampler.draw(0.701f), 2);
  EXPECT_EQ(sampler.draw(0.99999994f), 2);
}

TEST(Sampler, NeverDrawsWhatHasNoMass) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> z(1000, -kInf);
  z[400] = 1.0f;
  z[700] = 1.0f;
  Sampler sampler({}, 1000);
  ASSERT_TRUE(sampler.load(z.data()));
  EXPECT_EQ(sampler.draw(0.0f), 400);
  EXPECT_EQ(sampler.draw(0.49f), 400);
  EXPECT_EQ(sampler.draw(0.51f), 700);
  EXPECT_EQ(sampler.draw(0.99999994f), 700);
}

TEST(Sampler, RefusesLogitsThatAreNotFinite) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const SamplerOptions& options :
       {SamplerOptions{},
        SamplerOptions{.temperature = 0.0},
        SamplerOptions{.temperature = 1.0, .top_p = 0.5},
        SamplerOptions{.temperature = 1.0, .top_p = 1.0, .top_k = 3}}) {
    for (const int32_t place : {0, 17, 299}) {
      std::vector<float> z = random_logits(300, 1.0f, 5);
      Sampler sampler(options, 300);
      EXPECT_TRUE(sampler.load(z.data()));
      z[place] = nan;
      EXPECT_FALSE(sampler.load(z.data()));
      z[place] = kInf;
      EXPECT_FALSE(sampler.load(z.data()));
    }
    const std::vector<float> nothing(300, -kInf);
    Sampler sampler(options, 300);
    EXPECT_FALSE(sampler.load(nothing.data()));
  }
}

TEST(Sampler, TemperatureScalesTheOdds) {
  const std::vector<float> z = {0.0f, 1.0f};
  for (const double temperature : {0.25, 1.0, 4.0}) {
    Sampler sampler({.temperature = temperature}, 2);
    ASSERT_TRUE(sampler.load(z.data()));
    const double p0 = 1.0 / (1.0 + std::exp(1.0 / temperature));
    EXPECT_EQ(sampler.draw(static_cast<float>(p0) - 1e-4f), 0);
    EXPECT_EQ(sampler.draw(static_cast<float>(p0) + 1e-4f), 1);
  }
}

}  // namespace
}  // namespace banyan::rollout
