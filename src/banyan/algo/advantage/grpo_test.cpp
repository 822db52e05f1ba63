#include <gtest/gtest.h>

#include <cmath>

#include "banyan/algo/advantage.h"

namespace banyan::algo {
namespace {

AdvantageInput two_groups() {
  AdvantageInput input;
  input.group = {5, 9, 5, 9, 5, 9, 5};
  input.reward = {1.0, 0.25, 0.0, 0.25, 0.0, 0.25, 1.0};
  input.num_tokens = {3, 3, 3, 3, 3, 3, 3};
  input.valid.assign(7, 1);
  return input;
}

TEST(Grpo, HandComputedGroup) {
  // Group 5: rewards 1 0 0 1, mean 1/2, variance 4 (1/4) / 3 = 1/3. Group 9: equal rewards.
  const auto advantage = advantages().get("grpo")(two_groups(), {});
  const double wanted = 0.5 / (std::sqrt(1.0 / 3.0) + 1e-6);
  EXPECT_DOUBLE_EQ(advantage[0], wanted);
  EXPECT_DOUBLE_EQ(advantage[2], -wanted);
  EXPECT_DOUBLE_EQ(advantage[4], -wanted);
  EXPECT_DOUBLE_EQ(advantage[6], wanted);
  for (const size_t i : {1, 3, 5}) EXPECT_EQ(advantage[i], 0.0);
}

TEST(Grpo, WithoutStdIsDrGrpo) {
  AdvantageOptions options;
  options.norm_adv_by_std_in_grpo = false;
  const auto advantage = advantages().get("grpo")(two_groups(), options);
  EXPECT_EQ(advantage, (std::vector<double>{0.5, 0.0, -0.5, 0.0, -0.5, 0.0, 0.5}));
}

TEST(Grpo, EqualRewardsThatDoNotAverageExactlyStillGiveZero) {
  AdvantageInput input;
  input.group.assign(3, 0);
  input.reward.assign(3, 0.1);  // (0.1 + 0.1 + 0.1) / 3 != 0.1 in fp64
  input.valid.assign(3, 1);
  EXPECT_EQ(advantages().get("grpo")(input, {}), (std::vector<double>{0.0, 0.0, 0.0}));
}

TEST(Grpo, FailedSamplesLeaveTheStatistics) {
  AdvantageInput input = two_groups();
  input.valid = {1, 1, 1, 0, 0, 0, 0};  // group 5 keeps rewards 1 and 0, group 9 keeps one sample
  const auto advantage = advantages().get("grpo")(input, {});
  const double wanted = 0.5 / (std::sqrt(0.5) + 1e-6);
  EXPECT_DOUBLE_EQ(advantage[0], wanted);
  EXPECT_DOUBLE_EQ(advantage[2], -wanted);
  for (const size_t i : {1, 3, 4, 5, 6}) EXPECT_EQ(advantage[i], 0.0);
}

TEST(Grpo, OrderOfTheBatchDoesNotMatter) {
  const AdvantageInput input = two_groups();
  AdvantageInput reversed = input;
  for (size_t i = 0; i < 7; ++i) {
    reversed.group[i] = input.group[6 - i];
    reversed.reward[i] = input.reward[6 - i];
  }
  const auto forward = advantages().get("grpo")(input, {});
  const auto backward = advantages().get("grpo")(reversed, {});
  for (size_t i = 0; i < 7; ++i) EXPECT_DOUBLE_EQ(forward[i], backward[6 - i]);
}

TEST(Advantages, UnknownNamePrintsTheKnownOnes) {
  try {
    advantages().get("gpro");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("[algorithm.adv_estimator] wanted one of grpo"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace banyan::algo
