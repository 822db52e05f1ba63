// Token rewards, KL in the reward and its controller, resampling, flat groups, the variance proxy.
#include <gtest/gtest.h>

#include <cmath>

#include "banyan/algo/group_filter.h"
#include "banyan/algo/resample.h"
#include "banyan/algo/reward_kl.h"
#include "banyan/algo/variance_proxy.h"

namespace banyan::algo {
namespace {

TEST(RewardKl, TheScoreSitsOnTheLastToken) {
  EXPECT_EQ(token_rewards({2.0, 3.0, 4.0}, {3, 1, 0}), (PerToken{{0.0, 0.0, 2.0}, {3.0}, {}}));
}

TEST(RewardKl, SubtractsFromEveryTokenOfValidRows) {
  PerToken reward = {{0.0, 1.0}, {5.0}, {2.0}};
  // Row 0: d = 0.5, -0.5; row 1 not valid; row 2: d = 2. Means 0 and 2: KL = 1.
  const RewardKl measured = subtract_kl(
      {{-1.0, -2.0}, {-1.0}, {-1.0}}, {{-1.5, -1.5}, {-9.0}, {-3.0}}, {1, 0, 1}, "kl", 0.1, reward);
  EXPECT_EQ(measured.num_sequences, 2.0);
  EXPECT_DOUBLE_EQ(measured.kl, 1.0);
  EXPECT_NEAR(reward[0][0], -0.05, 1e-15);
  EXPECT_NEAR(reward[0][1], 1.05, 1e-15);
  EXPECT_EQ(reward[1][0], 5.0);
  EXPECT_NEAR(reward[2][0], 1.8, 1e-15);
}

TEST(RewardKl, EveryEstimatorAndItsPlusForm) {
  const double d = 0.5;
  const auto kl = [&](const std::string& name) {
    PerToken reward = {{0.0}};
    subtract_kl({{-1.0}}, {{-1.0 - d}}, {1}, name, 1.0, reward);
    return -reward[0][0];
  };
  for (const char* plus : {"", "+"}) {
    EXPECT_DOUBLE_EQ(kl(std::string("k1") + plus), d);
    EXPECT_DOUBLE_EQ(kl(std::string("abs") + plus), d);
    EXPECT_DOUBLE_EQ(kl(std::string("mse") + plus), d * d / 2.0);
    EXPECT_DOUBLE_EQ(kl(std::string("low_var_kl") + plus), std::exp(-d) + d - 1.0);
  }
  try {
    check_kl_penalty("full");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("[algorithm.kl_penalty] wanted one of kl, k1"),
              std::string::npos);
  }
}

TEST(KlController, FixedStaysAdaptiveFollowsTheTarget) {
  KlController fixed("fixed", 0.2, 0.1, 100.0);
  fixed.update({.kl = 5.0, .num_sequences = 10.0});
  EXPECT_EQ(fixed.coef(), 0.2);
  KlController adaptive("adaptive", 0.2, 0.1, 100.0);
  adaptive.update({.kl = 0.11, .num_sequences = 10.0});  // error 0.1: 0.2 (1 + 0.1 * 10 / 100)
  EXPECT_NEAR(adaptive.coef(), 0.2 * 1.01, 1e-15);
  adaptive.set_coef(1.0);
  adaptive.update({.kl = 5.0, .num_sequences = 10.0});  // clipped at 0.2
  EXPECT_NEAR(adaptive.coef(), 1.02, 1e-15);
  adaptive.update({.kl = 0.0, .num_sequences = 50.0});  // clipped at -0.2
  EXPECT_NEAR(adaptive.coef(), 1.02 * 0.9, 1e-15);
}

TEST(KlController, BadOptionsAreNamed) {
  EXPECT_THROW(KlController("linear", 0.1, 0.1, 1.0), std::invalid_argument);
  EXPECT_THROW(KlController("fixed", -0.1, 0.1, 1.0), std::invalid_argument);
  EXPECT_THROW(KlController("adaptive", 0.1, 0.0, 1.0), std::invalid_argument);
  EXPECT_THROW(KlController("adaptive", 0.1, 0.1, 0.0), std::invalid_argument);
}

// Share of each row in many draws.
std::vector<double> shares(const std::vector<double>& score, const ResampleOptions& options) {
  std::vector<double> share(score.size(), 0.0);
  const std::vector<uint8_t> valid(score.size(), 1);
  const double draws = 4000.0 * static_cast<double>(score.size());
  for (uint64_t step = 0; step < 4000; ++step) {
    for (const int64_t i : resample(score, valid, options, /*seed=*/7, step))
      share[i] += 1.0 / draws;
  }
  return share;
}

TEST(Resample, DrawsInProportionToTheWeights) {
  // pow 2 of 1, -2, 0, 0.5: 1, 4, 0, 0.25 of 5.25.
  const std::vector<double> pow = shares({1.0, -2.0, 0.0, 0.5}, {});
  EXPECT_NEAR(pow[0], 1.0 / 5.25, 0.012);
  EXPECT_NEAR(pow[1], 4.0 / 5.25, 0.012);
  EXPECT_LT(pow[2], 1e-3);
  const std::vector<double> extremes =
      shares({1.0, -2.0, 0.0, 0.5}, {.reweight_method = "max_min"});
  EXPECT_NEAR(extremes[0], 0.5, 0.015);
  EXPECT_NEAR(extremes[1], 0.5, 0.015);
  const std::vector<double> best = shares({1.0, -2.0, 0.0, 0.5}, {.reweight_method = "max_random"});
  EXPECT_NEAR(best[0], 0.4 / 0.7, 0.015);
  EXPECT_NEAR(best[3], 0.1 / 0.7, 0.015);
}

TEST(Resample, IsReproducibleAndSkipsRowsThatAreNotValid) {
  const std::vector<double> score = {1.0, 5.0, 2.0};
  const auto first = resample(score, {1, 0, 1}, {}, 7, 1);
  EXPECT_EQ(first.size(), 2u);
  for (const int64_t i : first) EXPECT_NE(i, 1);
  EXPECT_EQ(first, resample(score, {1, 0, 1}, {}, 7, 1));
  EXPECT_TRUE(resample(score, {0, 0, 0}, {}, 7, 1).empty());
  // Zero scores are drawn evenly: the floor 1e-8 is all they have.
  EXPECT_EQ(resample({0.0, 0.0}, {1, 1}, {}, 7, 1).size(), 2u);
  EXPECT_THROW(check_resample_options({.reweight_method = "max"}), std::invalid_argument);
}

TEST(GroupFilter, DropsGroupsThatTeachNothing) {
  // Group 1 differs, 2 is flat, 3 has one valid member, 4 none.
  EXPECT_EQ(flat_groups({1, 1, 2, 2, 2, 3, 3, 4},
                        {1, 1, 1, 1, 0, 1, 0, 0},
                        {0.1, 0.2, 0.1, 0.1, 9.0, 1.0, 0.0, 1.0}),
            (std::vector<int64_t>{2, 4}));
}

TEST(VarianceProxy, SignalNoiseAndPower) {
  // a = 1 and -2; e = 1 - 2 p + q: row 0: 0.5 and 0.5 (p 0.5, q 0.5): W = 1; row 1: 0.25 (p 0.5, q
  // 0.25).
  const PerToken advantage = {{1.0, 1.0}, {-2.0}};
  const double l = std::log(0.5);
  const MetricMap figures =
      variance_proxy(advantage, {{l, l}, {l}}, {{0.5, 0.5}, {0.25}}, {}, /*grad_norm=*/0.5);
  EXPECT_NEAR(value_of(figures.at("proxy1_signal_strength")), 0.25, 1e-14);
  EXPECT_NEAR(value_of(figures.at("proxy2_total_power")), (1.0 + 4.0 * 0.25) / 2.0, 1e-14);
  EXPECT_NEAR(value_of(figures.at("proxy3_pure_noise")), (1.0 - 0.25) / 1.0, 1e-14);
  EXPECT_NEAR(value_of(figures.at("expected_a_squared")), 2.5, 1e-14);
  EXPECT_NEAR(value_of(figures.at("expected_w")), 0.625, 1e-14);
  const MetricMap weighted =
      variance_proxy(advantage, {{l, l}, {l}}, {{0.5, 0.5}, {0.25}}, {{2.0, 4.0}, {1.0}}, 0.5);
  EXPECT_NEAR(value_of(weighted.at("proxy2_total_power")), (9.0 + 1.0) / 2.0, 1e-14);
}

}  // namespace
}  // namespace banyan::algo
