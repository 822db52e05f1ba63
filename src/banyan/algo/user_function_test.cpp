// Functions of the user as std::function: what they see, what is checked, how they join the rest.
#include "banyan/algo/user_function.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>

#include "banyan/algo/reward_kl.h"

namespace banyan::algo {
namespace {

LossTokens two_tokens() {
  LossTokens tokens;
  tokens.log_prob = at::tensor({-1.0, -2.0}, at::kDouble);
  tokens.advantage = at::tensor({2.0, -1.0}, at::kDouble);
  tokens.mask = at::ones({2}, at::kDouble);
  tokens.offsets = {0, 2};
  return tokens;
}

LossResult run(const std::string& name, const LossTokens& tokens) {
  LossOptions options;
  options.loss_mode = name;
  options.loss_agg_mode = "token-sum";
  return actor_loss(tokens, {}, options);
}

void expect_refused(const std::function<void()>& call, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "accepted, wanted " << text;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(UserLoss, ReplacesThePolicyLoss) {
  set_user_loss(
      "my.py:loss",
      [](const LossTokens& tokens, const at::Tensor& log_prob, const LossOptions&) {
        PolicyLossResult result;
        result.loss = -tokens.advantage * log_prob * log_prob;
        result.metrics["mine"] = mean_of(3.0, 1.0);
        return result;
      },
      /*applies_weight=*/false);
  const LossResult result = run("my.py:loss", two_tokens());
  EXPECT_DOUBLE_EQ(result.metrics.pg_loss, -2.0 + 4.0);
  EXPECT_DOUBLE_EQ(result.grad_log_prob[0].item<double>(), -2.0 * 2.0 * -1.0);
  EXPECT_DOUBLE_EQ(value_of(result.metrics.extra.at("mine")), 3.0);
  EXPECT_EQ(policy_loss("my.py:loss").scope, PolicyScope::kMiniBatch);
  LossTokens weighted = two_tokens();
  weighted.weight = at::tensor({0.5, 1.0}, at::kDouble);
  EXPECT_DOUBLE_EQ(run("my.py:loss", weighted).metrics.pg_loss, -1.0 + 4.0);
}

TEST(UserLoss, WrongResultsAreNamed) {
  const auto returns = [](const at::Tensor& loss) {
    set_user_loss(
        "my.py:bad",
        [loss](const LossTokens&, const at::Tensor&, const LossOptions&) {
          PolicyLossResult result;
          result.loss = loss;
          return result;
        },
        false);
    run("my.py:bad", two_tokens());
  };
  const at::Tensor nan = at::tensor({0.0, std::nan("")}, at::kDouble).requires_grad_(true);
  expect_refused([&] { returns({}); }, "my.py:bad: wanted one loss per token");
  expect_refused([&] { returns(at::ones({3}, at::kDouble)); }, "shape [2], got [3]");
  expect_refused([&] { returns(at::ones({2}, at::kDouble)); }, "wanted a loss that depends on");
  expect_refused([&] { returns(at::ones({2}, at::kLong)); }, "wanted a floating-point tensor");
  expect_refused([&] { returns(nan); }, "wanted finite numbers, got nan at token 1");
  expect_refused([&] { policy_loss("other.py:loss"); }, "wanted a loaded function 'other.py:loss'");
}

TEST(UserAdvantage, SeesRowsThatTakePartOnly) {
  set_user_advantage("my.py:adv", [](const AdvantageInput& input, const AdvantageOptions&) {
    EXPECT_EQ(input.group, (std::vector<int64_t>{4, 6}));
    EXPECT_EQ(input.score, (std::vector<double>{1.0, 3.0}));
    AdvantageResult result;
    result.advantage = {{0.5, 0.5}, {-1.0}};
    result.returns = result.advantage;
    return result;
  });
  AdvantageInput input;
  input.group = {4, 5, 6, 7};
  input.valid = {1, 0, 1, 1};
  input.score = {1.0, 2.0, 3.0, 4.0};
  input.token_reward = token_rewards(input.score, {2, 2, 1, 0});
  const AdvantageResult result = compute_advantages("my.py:adv", input, {});
  EXPECT_EQ(result.advantage, (PerToken{{0.5, 0.5}, {0.0, 0.0}, {-1.0}, {}}));
}

TEST(UserAdvantage, WrongResultsAreNamed) {
  AdvantageInput input;
  input.group = {0, 0};
  input.valid = {1, 1};
  input.score = {1.0, 2.0};
  input.token_reward = token_rewards(input.score, {2, 1});
  const auto returns = [&](PerToken values) {
    set_user_advantage("my.py:bad", [values](const AdvantageInput&, const AdvantageOptions&) {
      return AdvantageResult{values, values};
    });
    compute_advantages("my.py:bad", input, {});
  };
  expect_refused([&] { returns({{1.0, 1.0}}); },
                 "my.py:bad: wanted advantages of 2 responses, got 1");
  expect_refused([&] { returns({{1.0}, {1.0}}); }, "wanted 2 advantages for response 0, got 1");
  expect_refused([&] { returns({{1.0, INFINITY}, {1.0}}); }, "wanted finite advantages, got inf");
  expect_refused([&] { advantage("other.py:adv"); }, "[algorithm.adv_estimator] wanted a loaded");
}

}  // namespace
}  // namespace banyan::algo
