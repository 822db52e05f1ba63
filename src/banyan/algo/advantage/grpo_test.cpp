#include <gtest/gtest.h>

#include <cmath>

#include "banyan/algo/advantage.h"
#include "banyan/algo/reward_kl.h"

namespace banyan::algo {
namespace {

AdvantageInput outcomes(std::vector<int64_t> group, std::vector<double> score) {
  AdvantageInput input;
  input.group = std::move(group);
  input.valid.assign(score.size(), 1);
  input.token_reward = token_rewards(score, std::vector<int64_t>(score.size(), 3));
  input.score = std::move(score);
  return input;
}

AdvantageInput two_groups() {
  return outcomes({5, 9, 5, 9, 5, 9, 5}, {1.0, 0.25, 0.0, 0.25, 0.0, 0.25, 1.0});
}

// The first token of each row; all tokens must carry the same number.
std::vector<double> grpo(const AdvantageInput& input, const AdvantageOptions& options = {}) {
  std::vector<double> out;
  for (const auto& row : compute_advantages("grpo", input, options).advantage) {
    EXPECT_EQ(row, std::vector<double>(3, row[0]));
    out.push_back(row[0]);
  }
  return out;
}

TEST(Grpo, HandComputedGroup) {
  // Group 5: rewards 1 0 0 1, mean 1/2, variance 4 (1/4) / 3 = 1/3. Group 9: equal rewards.
  const auto advantage = grpo(two_groups());
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
  const auto advantage = grpo(two_groups(), options);
  EXPECT_EQ(advantage, (std::vector<double>{0.5, 0.0, -0.5, 0.0, -0.5, 0.0, 0.5}));
}

TEST(Grpo, EqualRewardsThatDoNotAverageExactlyStillGiveZero) {
  const AdvantageInput input =
      outcomes({0, 0, 0}, {0.1, 0.1, 0.1});  // (0.1 + 0.1 + 0.1) / 3 != 0.1 in fp64
  EXPECT_EQ(grpo(input), (std::vector<double>{0.0, 0.0, 0.0}));
}

TEST(Grpo, FailedSamplesLeaveTheStatistics) {
  AdvantageInput input = two_groups();
  input.valid = {1, 1, 1, 0, 0, 0, 0};  // group 5 keeps rewards 1 and 0, group 9 keeps one sample
  const auto advantage = grpo(input);
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
    reversed.token_reward[i] = input.token_reward[6 - i];
  }
  const auto forward = grpo(input);
  const auto backward = grpo(reversed);
  for (size_t i = 0; i < 7; ++i) EXPECT_DOUBLE_EQ(forward[i], backward[6 - i]);
}

TEST(Advantages, UnknownNamePrintsTheKnownOnes) {
  try {
    advantage("gpro");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("[algorithm.adv_estimator] wanted one of gae, gdpo"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace banyan::algo
