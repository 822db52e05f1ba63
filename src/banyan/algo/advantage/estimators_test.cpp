// Every estimator on numbers worked out by hand; the arithmetic stands beside each case.
#include <gtest/gtest.h>

#include <cmath>

#include "banyan/algo/advantage.h"
#include "banyan/algo/reward_kl.h"

namespace banyan::algo {
namespace {

using Row = std::vector<double>;

AdvantageInput outcomes(std::vector<int64_t> group,
                        Row score,
                        const std::vector<int64_t>& lengths) {
  AdvantageInput input;
  input.group = std::move(group);
  input.valid.assign(score.size(), 1);
  input.token_reward = token_rewards(score, lengths);
  input.score = std::move(score);
  return input;
}

void expect_rows(const PerToken& got, const PerToken& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].size(), wanted[i].size()) << "row " << i;
    for (size_t t = 0; t < got[i].size(); ++t) {
      EXPECT_NEAR(got[i][t], wanted[i][t], 1e-12) << "row " << i << " token " << t;
    }
  }
}

// Group 0: scores 1, 0, 0.5 of lengths 2, 1, 1 (mean 0.5, variance 0.25, std 0.5). Group 1: 2
// and 2.
AdvantageInput two_groups() {
  return outcomes({0, 0, 0, 1, 1}, {1.0, 0.0, 0.5, 2.0, 2.0}, {2, 1, 1, 1, 2});
}

TEST(Gae, RunsBackwardsAndWhitens) {
  AdvantageInput input = outcomes({0, 1}, {1.0, 0.0}, {2, 1});
  input.value = {{0.5, 0.25}, {0.5}};
  const AdvantageOptions options{.gamma = 0.5, .lam = 0.5};
  // Row 0: d_2 = 1 - 0.25 = 0.75, a_2 = 0.75; d_1 = 0 + 0.5 * 0.25 - 0.5 = -0.375,
  // a_1 = -0.375 + 0.25 * 0.75 = -0.1875. Row 1: a = 0 - 0.5 = -0.5. R = a + V.
  const AdvantageResult result = compute_advantages("gae", input, options);
  expect_rows(result.returns, {{0.3125, 1.0}, {0.0}});
  const Row raw = {-0.1875, 0.75, -0.5};
  const double mean = 0.0625 / 3.0;
  double squares = 0.0;
  for (const double a : raw) squares += (a - mean) * (a - mean);
  const double scale = 1.0 / std::sqrt(squares / 2.0 + 1e-8);
  expect_rows(result.advantage,
              {{(raw[0] - mean) * scale, (raw[1] - mean) * scale}, {(raw[2] - mean) * scale}});
}

TEST(GrpoPassk, OnlyTheBestLearns) {
  // Group 0: (1 - 0.5) / (0.5 + 1e-6) for the best; group 1 is flat.
  const double best = 0.5 / (0.5 + 1e-6);
  expect_rows(compute_advantages("grpo_passk", two_groups(), {}).advantage,
              {{best, best}, {0.0}, {0.0}, {0.0}, {0.0, 0.0}});
  const AdvantageOptions plain{.norm_adv_by_std_in_grpo = false};
  expect_rows(compute_advantages("grpo_passk", two_groups(), plain).advantage,
              {{0.5, 0.5}, {0.0}, {0.0}, {0.0}, {0.0, 0.0}});
}

TEST(Gdpo, NormalisesEachComponentBeforeTheyAreAdded) {
  AdvantageInput input = outcomes({0, 0}, {9.0, 9.0}, {1, 1});
  input.components["right"] = {1.0, 0.0};   // mean 0.5, std sqrt(0.5): +-0.5 / (0.7071 + 1e-6)
  input.components["format"] = {0.0, 3.0};  // +-1.5 / (2.1213 + 1e-6)
  AdvantageOptions options;
  options.gdpo_reward_keys = {"right", "format"};
  options.gdpo_reward_weights = {2.0, 0.5};
  const double a = 2.0 * 0.5 / (std::sqrt(0.5) + 1e-6) - 0.5 * 1.5 / (std::sqrt(4.5) + 1e-6);
  // Whitened: mean 0, variance 2 a^2.
  const double wanted = a / std::sqrt(2.0 * a * a + 1e-8);
  expect_rows(compute_advantages("gdpo", input, options).advantage, {{wanted}, {-wanted}});
}

TEST(ReinforcePlusPlus, DiscountsAndWhitens) {
  const AdvantageInput input = outcomes({0, 1}, {1.0, 0.0}, {2, 1});
  const AdvantageResult result = compute_advantages("reinforce_plus_plus", input, {.gamma = 0.5});
  expect_rows(result.returns, {{0.5, 1.0}, {0.0}});
  // Mean 0.5, deviations 0, 0.5, -0.5: variance 0.5 / 2 = 0.25.
  const double scale = 1.0 / std::sqrt(0.25 + 1e-8);
  expect_rows(result.advantage, {{0.0, 0.5 * scale}, {-0.5 * scale}});
}

TEST(ReinforcePlusPlusBaseline, WhitensWhatTheGroupMeanLeaves) {
  // r - mean_g: 0.5 (2 tokens), -0.5, 0, then 0 and 0 (2 tokens): mean 0.5 / 7.
  const AdvantageResult result =
      compute_advantages("reinforce_plus_plus_baseline", two_groups(), {});
  const Row raw = {0.5, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0};
  const double mean = 0.5 / 7.0;
  double squares = 0.0;
  for (const double a : raw) squares += (a - mean) * (a - mean);
  const double scale = 1.0 / std::sqrt(squares / 6.0 + 1e-8);
  const double high = (0.5 - mean) * scale, low = (-0.5 - mean) * scale, flat = -mean * scale;
  expect_rows(result.advantage, {{high, high}, {low}, {flat}, {flat}, {flat, flat}});
}

TEST(Rloo, ComparesWithTheMeanOfTheOthers) {
  // 1 - (0 + 0.5) / 2, 0 - (1 + 0.5) / 2, 0.5 - (1 + 0) / 2.
  const PerToken wanted = {{0.75, 0.75}, {-0.75}, {0.0}, {0.0}, {0.0, 0.0}};
  for (const char* name : {"rloo", "rloo_vectorized"}) {
    expect_rows(compute_advantages(name, two_groups(), {}).advantage, wanted);
  }
}

TEST(Opo, WeighsTheBaselineByLength) {
  // (2 * 1 + 1 * 0 + 1 * 0.5) / 4 = 0.625.
  expect_rows(compute_advantages("opo", two_groups(), {}).advantage,
              {{0.375, 0.375}, {-0.625}, {-0.125}, {0.0}, {0.0, 0.0}});
}

TEST(Remax, SubtractsTheGreedyScore) {
  AdvantageInput input = outcomes({0, 1}, {1.0, 0.25}, {2, 1});
  input.token_reward[0] = {-0.5, 1.0};  // a KL in the reward: rewards to go 0.5, 1
  input.greedy_score = {0.75, 0.5};
  const AdvantageResult result = compute_advantages("remax", input, {});
  expect_rows(result.returns, {{0.5, 1.0}, {0.25}});
  expect_rows(result.advantage, {{-0.25, 0.25}, {-0.25}});
}

TEST(Gpg, ScalesByTheShareOfInformativeTrajectories) {
  // 5 trajectories, 3 of them in a group whose rewards differ: alpha = 5 / 3 (T28).
  const double alpha = 5.0 / 3.0;
  expect_rows(compute_advantages("gpg", two_groups(), {}).advantage,
              {{0.5 * alpha, 0.5 * alpha}, {-0.5 * alpha}, {0.0}, {0.0}, {0.0, 0.0}});
}

// Two responses of one group with lengths 2 and 1, scores 1 and 0.
AdvantageInput token_case() {
  AdvantageInput input = outcomes({0, 0}, {1.0, 0.0}, {2, 1});
  input.old_log_prob = {{std::log(0.5), std::log(0.25)}, {std::log(0.5)}};
  input.sum_squares = {{0.5, 0.25}, {0.75}};
  return input;
}

TEST(OptimalTokenBaseline, WeighsReturnsPerPosition) {
  // e: row 0: 1 - 1 + 0.5 = 0.5; row 1: 1 - 1 + 0.75 = 0.75.
  // b_1 = (1 * 0.5 + 0 * 0.75) / (1.25 + 1e-8); beyond position 1 only row 0 has tokens: b = 0.
  const double b = 0.5 / (1.25 + 1e-8);
  for (const char* name : {"optimal_token_baseline", "tir_optimal_token_baseline"}) {
    const AdvantageResult result = compute_advantages(name, token_case(), {});
    expect_rows(result.returns, {{1.0, 1.0}, {0.0}});
    expect_rows(result.advantage, {{1.0 - b, 1.0}, {-b}});
  }
}

TEST(OptimalTokenBaseline, WeightsEnterSquared) {
  AdvantageInput input = token_case();
  input.weight = {{2.0, 1.0}, {1.0}};  // e of row 0 becomes 4 * 0.5 = 2
  const double b = 2.0 / (2.75 + 1e-8);
  expect_rows(compute_advantages("optimal_token_baseline", input, {}).advantage,
              {{1.0 - b, 1.0}, {-b}});
}

TEST(OptimalTokenBaseline, ObservationsShiftPositionsUnlessSqueezedOut) {
  AdvantageInput input = outcomes({0, 0}, {1.0, 0.0}, {2, 2});
  input.old_log_prob = {{std::log(0.5), std::log(0.5)}, {std::log(0.5), std::log(0.5)}};
  input.sum_squares = {{0.5, 0.5}, {0.5, 0.5}};
  input.position = {{0, 1}, {0, 3}};  // row 1 has two observation tokens between its own
  // e = 0.5 everywhere, W = 0.5 then 1. Squeezed: positions 0 and 1 hold both rows, b = 1/2 at each
  // (0.5 / (1 + 1e-8), then 1 / (2 + 1e-8)).
  const double first = 0.5 / (1.0 + 1e-8), second = 1.0 / (2.0 + 1e-8);
  expect_rows(compute_advantages("tir_optimal_token_baseline", input, {}).advantage,
              {{1.0 - first, 1.0 - second}, {-first, -second}});
  // By position: 1 holds row 0 alone, so its baseline is its own return; 3 lies beyond the second
  // longest response (2), so b = 0 there.
  expect_rows(compute_advantages("optimal_token_baseline", input, {}).advantage,
              {{1.0 - first, 0.0}, {-first, 0.0}});
}

TEST(Advantages, AGroupOfOneHasNoRelativeAdvantage) {
  AdvantageInput input = outcomes({0, 0, 1}, {1.0, 0.0, 7.0}, {1, 1, 2});
  input.components["score"] = input.score;
  input.old_log_prob = {{-1.0}, {-1.0}, {-1.0, -1.0}};
  input.sum_squares = {{0.5}, {0.5}, {0.5, 0.5}};
  AdvantageOptions options;
  options.gdpo_reward_keys = {"score"};
  int64_t relative = 0;
  for (const std::string& name : advantages().names()) {
    if (!advantages().get(name).is_group_relative) continue;
    ++relative;
    const AdvantageResult result = compute_advantages(name, input, options);
    EXPECT_EQ(result.advantage[2], (Row{0.0, 0.0})) << name;
    EXPECT_GT(result.advantage[0][0], 0.0) << name;
    try {
      check_advantage_options(name, options, 1);
      ADD_FAILURE() << name << " accepts rollout.n = 1";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("[rollout.n] wanted >= 2"), std::string::npos);
    }
  }
  EXPECT_EQ(relative, 11);
}

TEST(Advantages, EqualRewardsGiveExactlyZero) {
  const AdvantageInput input = outcomes({0, 0, 0}, {0.1, 0.1, 0.1}, {1, 2, 3});
  for (const char* name :
       {"grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"}) {
    for (const Row& row : compute_advantages(name, input, {}).advantage) {
      EXPECT_EQ(row, Row(row.size(), 0.0)) << name;
    }
  }
}

TEST(Advantages, WhiteningFewerThanTwoTokensGivesZeros) {
  AdvantageInput input = outcomes({0}, {1.0}, {1});
  input.value = {{0.25}};
  expect_rows(compute_advantages("gae", input, {}).advantage, {{0.0}});
  expect_rows(compute_advantages("gae", input, {}).returns, {{1.0}});
  expect_rows(compute_advantages("reinforce_plus_plus", input, {}).advantage, {{0.0}});
}

TEST(Advantages, OutputsOfOneTrajectoryCountOnceAndShareTheAdvantage) {
  // Rows 0 and 1 are two outputs of one trajectory (score 1), row 2 is another (score 0): mean 0.5,
  // not 2 / 3.
  AdvantageInput input = outcomes({0, 0, 0}, {1.0, 1.0, 0.0}, {1, 2, 1});
  input.trajectory = {10, 10, 11};
  expect_rows(compute_advantages("grpo", input, {.norm_adv_by_std_in_grpo = false}).advantage,
              {{0.5}, {0.5, 0.5}, {-0.5}});
  // opo: lengths 3 and 1: baseline 3 / 4.
  expect_rows(compute_advantages("opo", input, {}).advantage, {{0.25}, {0.25, 0.25}, {-0.75}});
}

TEST(Advantages, RowsThatAreNotValidTakeNoPart) {
  AdvantageInput input = outcomes({0, 0, 0}, {1.0, 0.0, 99.0}, {1, 1, 2});
  input.valid = {1, 1, 0};
  input.value = {{0.0}, {0.0}, {}};  // nothing is computed for a row that is not valid
  for (const char* name : {"grpo", "rloo", "gae", "reinforce_plus_plus"}) {
    const AdvantageResult result = compute_advantages(name, input, {});
    EXPECT_EQ(result.advantage[2], (Row{0.0, 0.0})) << name;
    EXPECT_NEAR(result.advantage[0][0], -result.advantage[1][0], 1e-12) << name;
  }
}

TEST(Advantages, OptionsOutOfRangeAreNamed) {
  const auto refused = [](const char* name, const AdvantageOptions& options, const char* text) {
    try {
      check_advantage_options(name, options, 4);
      ADD_FAILURE() << "accepted, wanted " << text;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused("gae", {.gamma = 1.5}, "[algorithm.gamma] wanted a number in [0, 1], got 1.5");
  refused("gae", {.lam = -1.0}, "[algorithm.lam] wanted");
  refused("gdpo", {}, "[algorithm.gdpo_reward_keys] wanted the names");
  refused("gdpo",
          {.gdpo_reward_keys = {"a", "b"}, .gdpo_reward_weights = {1.0}},
          "[algorithm.gdpo_reward_weights] wanted one per name of gdpo_reward_keys (2), got 1");
  AdvantageInput input = outcomes({0, 0}, {1.0, 0.0}, {1, 1});
  EXPECT_THROW(compute_advantages("gdpo", input, {.gdpo_reward_keys = {"missing"}}),
               std::invalid_argument);
}

}  // namespace
}  // namespace banyan::algo
