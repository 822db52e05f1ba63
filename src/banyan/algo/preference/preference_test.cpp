// One pair: chosen tokens -1 and -2 (reference -1.5, -2), rejected -3 (reference -2.5): h = 0.5 +
// 0.5 = 1.
#include "banyan/algo/preference.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>

namespace banyan::algo {
namespace {

using Values = std::vector<double>;

Values to_vector(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kDouble).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()};
}

double sigmoid(double z) { return 1.0 / (1.0 + std::exp(-z)); }

PreferenceTokens one_pair() {
  PreferenceTokens tokens;
  tokens.log_prob = at::tensor({-3.0, -1.0, -2.0}, at::kDouble);
  tokens.ref_log_prob = at::tensor({-2.5, -1.5, -2.0}, at::kDouble);
  tokens.offsets = {0, 1, 3};
  tokens.chosen = {1};
  tokens.rejected = {0};
  return tokens;
}

void expect_values(const at::Tensor& got, const Values& wanted) {
  const Values values = to_vector(got);
  ASSERT_EQ(values.size(), wanted.size());
  for (size_t u = 0; u < wanted.size(); ++u) EXPECT_NEAR(values[u], wanted[u], 1e-14) << u;
}

TEST(Preference, Dpo) {
  // beta 0.5: -log s(0.5), d/dh = -0.5 s(-0.5); two pairs in the mini-batch halve everything.
  const PreferenceResult result = preference_loss(one_pair(), 2.0, {.beta = 0.5});
  EXPECT_NEAR(result.loss, -std::log(sigmoid(0.5)) / 2.0, 1e-14);
  const double g = -0.5 * sigmoid(-0.5) / 2.0;
  expect_values(result.grad, {-g, g, g});
  EXPECT_DOUBLE_EQ(value_of(result.metrics.at("rewards/chosen")), 0.25);
  EXPECT_DOUBLE_EQ(value_of(result.metrics.at("rewards/rejected")), -0.25);
  EXPECT_DOUBLE_EQ(value_of(result.metrics.at("rewards/margins")), 0.5);
  EXPECT_DOUBLE_EQ(value_of(result.metrics.at("rewards/accuracies")), 1.0);
  EXPECT_DOUBLE_EQ(value_of(result.metrics.at("logps/chosen")), -3.0);
}

TEST(Preference, LabelSmoothing) {
  const PreferenceResult result =
      preference_loss(one_pair(), 1.0, {.beta = 0.5, .label_smoothing = 0.2});
  EXPECT_NEAR(result.loss, -0.8 * std::log(sigmoid(0.5)) - 0.2 * std::log(sigmoid(-0.5)), 1e-14);
  const double g = 0.5 * (-0.8 * sigmoid(-0.5) + 0.2 * sigmoid(0.5));
  expect_values(result.grad, {-g, g, g});
}

TEST(Preference, ReferenceFree) {
  PreferenceTokens tokens = one_pair();
  tokens.ref_log_prob.reset();
  // h = -3 - (-3) = 0.
  const PreferenceResult result =
      preference_loss(tokens, 1.0, {.beta = 0.5, .reference_free = true});
  EXPECT_NEAR(result.loss, std::log(2.0), 1e-14);
  expect_values(result.grad, {0.25, -0.25, -0.25});
}

TEST(Preference, Ipo) {
  // beta 0.25: (1 - 2)^2; d/dh = 2 (1 - 2).
  const PreferenceResult result =
      preference_loss(one_pair(), 1.0, {.loss_type = "ipo", .beta = 0.25});
  EXPECT_NEAR(result.loss, 1.0, 1e-14);
  expect_values(result.grad, {2.0, -2.0, -2.0});
}

TEST(Preference, SftTermOnTheChosenAnswer) {
  const PreferenceResult plain = preference_loss(one_pair(), 1.0, {});
  const PreferenceResult with = preference_loss(one_pair(), 1.0, {.sft_coef = 0.1});
  EXPECT_NEAR(with.loss, plain.loss + 0.1 * 1.5, 1e-14);
  const Values base = to_vector(plain.grad);
  expect_values(with.grad, {base[0], base[1] - 0.05, base[2] - 0.05});
}

TEST(Preference, LargeMarginsStayFinite) {
  PreferenceTokens tokens = one_pair();
  tokens.log_prob = at::tensor({-3.0, -1e6, -2.0}, at::kDouble);
  const PreferenceResult result = preference_loss(tokens, 1.0, {.beta = 1.0});
  EXPECT_NEAR(result.loss, 1e6 - 2.0, 2.0);
  EXPECT_NEAR(to_vector(result.grad)[1], -1.0, 1e-12);
}

TEST(Preference, BradleyTerry) {
  const at::Tensor chosen = at::tensor({1.0, 0.0}, at::kDouble);
  const at::Tensor rejected = at::tensor({0.5, 2.0}, at::kDouble);
  RewardModelResult result = reward_model_loss(chosen, rejected, {}, 2.0, {});
  EXPECT_NEAR(result.loss, -(std::log(sigmoid(0.5)) + std::log(sigmoid(-2.0))) / 2.0, 1e-14);
  expect_values(result.grad_chosen, {-sigmoid(-0.5) / 2.0, -sigmoid(2.0) / 2.0});
  expect_values(result.grad_rejected, {sigmoid(-0.5) / 2.0, sigmoid(2.0) / 2.0});
  EXPECT_DOUBLE_EQ(value_of(result.metrics.at("rewards/accuracies")), 0.5);
  result = reward_model_loss(chosen,
                             rejected,
                             at::tensor({0.5, 0.0}, at::kDouble),
                             2.0,
                             {.center_rewards_coefficient = 0.1});
  EXPECT_NEAR(
      result.loss, (std::log(2.0) + 0.1 * 2.25 - std::log(sigmoid(-2.0)) + 0.1 * 4.0) / 2.0, 1e-14);
  EXPECT_NEAR(to_vector(result.grad_chosen)[0], (-0.5 + 0.2 * 1.5) / 2.0, 1e-14);
}

TEST(Preference, BadOptionsAreNamed) {
  EXPECT_THROW(check_preference_options({.loss_type = "dpo"}), std::invalid_argument);
  EXPECT_THROW(check_preference_options({.beta = 0.0}), std::invalid_argument);
  EXPECT_THROW(check_preference_options({.label_smoothing = 0.5}), std::invalid_argument);
  EXPECT_THROW(check_preference_options({.loss_type = "ipo", .label_smoothing = 0.1}),
               std::invalid_argument);
  check_preference_options({});
}

}  // namespace
}  // namespace banyan::algo
