// Losses and gradients against numbers worked out by hand: one token per case, weight 1
// (token-sum).
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "banyan/algo/loss.h"

namespace banyan::algo {
namespace {

using Values = std::vector<double>;

LossTokens make_tokens(const Values& log_prob,
                       const Values& old_log_prob,
                       const Values& advantage) {
  LossTokens tokens;
  const auto size = static_cast<int64_t>(log_prob.size());
  tokens.log_prob = at::tensor(log_prob, at::kDouble);
  if (!old_log_prob.empty()) tokens.old_log_prob = at::tensor(old_log_prob, at::kDouble);
  tokens.advantage = at::tensor(advantage, at::kDouble);
  tokens.mask = at::ones({size}, at::kDouble);
  tokens.offsets = {0, size};
  return tokens;
}

LossOptions token_sum() {
  LossOptions options;
  options.loss_agg_mode = "token-sum";
  return options;
}

Values to_vector(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kDouble).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()};
}

struct OneToken {
  double loss, grad, clipped, clipped_lower;
};

// rho and A of one token under eL = 0.2, eH = 0.3, c = 3.
OneToken one_token(double rho, double advantage) {
  LossOptions options = token_sum();
  options.clip_ratio_high = 0.3;
  const LossResult result =
      actor_loss(make_tokens({std::log(rho)}, {0.0}, {advantage}), {}, options);
  return {result.metrics.loss,
          result.grad_log_prob.item<double>(),
          result.metrics.clipped_tokens,
          result.metrics.clipped_lower_tokens};
}

void expect_token(double rho, double advantage, const OneToken& wanted) {
  SCOPED_TRACE(::testing::Message() << "rho " << rho << " A " << advantage);
  const OneToken got = one_token(rho, advantage);
  EXPECT_NEAR(got.loss, wanted.loss, 1e-14);
  EXPECT_NEAR(got.grad, wanted.grad, 1e-14);
  EXPECT_EQ(got.clipped, wanted.clipped);
  EXPECT_EQ(got.clipped_lower, wanted.clipped_lower);
}

TEST(Vanilla, InsideTheBoundsIsThePlainRatio) {
  expect_token(1.1, 2.0, {-2.2, -2.2, 0, 0});
  expect_token(0.9, -2.0, {1.8, 1.8, 0, 0});
}

TEST(Vanilla, ClipsEachSideOnlyWhereItWouldGain) {
  expect_token(1.5, 2.0, {-2.6, 0.0, 1, 0});   // above 1 + eH with A > 0: flat
  expect_token(0.5, 2.0, {-1.0, -1.0, 0, 0});  // below 1 - eL with A > 0: not clipped
  expect_token(0.5, -2.0, {1.6, 0.0, 1, 0});   // below 1 - eL with A < 0: flat
  expect_token(1.5, -2.0, {3.0, 3.0, 0, 0});   // above 1 + eH with A < 0: not clipped
}

TEST(Vanilla, DualClipBoundsTheLossOfBadActions) {
  expect_token(2.9, -2.0, {5.8, 5.8, 0, 0});
  expect_token(5.0, -2.0, {6.0, 0.0, 0, 1});
  expect_token(5.0, 2.0, {-2.6, 0.0, 1, 0});
}

TEST(Vanilla, OnPolicyRatioIsExactlyOne) {
  const Values log_prob = {-0.1, -7.3, -1e-9, -30.0};
  const Values advantage = {1.5, -0.5, 2.0, 3.0};
  const LossResult result = actor_loss(make_tokens(log_prob, {}, advantage), {}, token_sum());
  EXPECT_EQ(result.metrics.max_abs_ratio_minus_one, 0.0);
  EXPECT_EQ(result.metrics.neg_log_ratio_sum, 0.0);
  EXPECT_EQ(result.metrics.loss, -6.0);
  EXPECT_EQ(to_vector(result.grad_log_prob), (Values{-1.5, 0.5, -2.0, -3.0}));
}

TEST(Vanilla, ExponentIsClampedAtTwenty) {
  const LossResult result = actor_loss(make_tokens({0.0}, {-400.0}, {-1.0}), {}, token_sum());
  EXPECT_EQ(result.metrics.neg_log_ratio_sum, -20.0);
  EXPECT_NEAR(result.metrics.max_abs_ratio_minus_one, std::exp(20.0) - 1.0, 1e-3);
  EXPECT_EQ(result.metrics.loss, 3.0);
}

double kl_value(const std::string& name, double d) {
  return kl_estimators()
      .get(name)(at::tensor({d}, at::kDouble), at::zeros({1}, at::kDouble))
      .item<double>();
}

TEST(Kl, EstimatorsAndClamps) {
  for (const char* name : {"kl", "k1"}) EXPECT_DOUBLE_EQ(kl_value(name, -0.5), -0.5);
  EXPECT_DOUBLE_EQ(kl_value("abs", -0.5), 0.5);
  for (const char* name : {"mse", "k2"}) EXPECT_DOUBLE_EQ(kl_value(name, -0.5), 0.125);
  for (const char* name : {"low_var_kl", "k3"}) {
    EXPECT_DOUBLE_EQ(kl_value(name, -0.5), std::exp(0.5) - 1.5);
    EXPECT_DOUBLE_EQ(kl_value(name, 0.5), std::exp(-0.5) - 0.5);
    EXPECT_DOUBLE_EQ(kl_value(name, -9.0), 10.0);  // exp(9) - 10 is clamped
    EXPECT_DOUBLE_EQ(kl_value(name, 90.0),
                     10.0);  // exponent clamped at -20: 19.0... is clamped too
    EXPECT_DOUBLE_EQ(kl_value(name, 5.0), std::exp(-5.0) + 4.0);
  }
}

LossResult with_kl(const std::string& type, double l, double l_old, double l_ref) {
  LossOptions options = token_sum();
  options.use_kl_loss = true;
  options.kl_loss_coef = 0.1;
  options.kl_loss_type = type;
  LossTokens tokens = make_tokens({l}, {l_old}, {0.0});
  tokens.ref_log_prob = at::tensor({l_ref}, at::kDouble);
  return actor_loss(tokens, {}, options);
}

TEST(Kl, LossAddsValueAndGradient) {
  const LossResult k2 = with_kl("k2", -1.0, -1.0, -1.5);
  EXPECT_DOUBLE_EQ(k2.metrics.kl_loss, 0.125);
  EXPECT_DOUBLE_EQ(k2.metrics.loss, 0.0125);
  EXPECT_DOUBLE_EQ(k2.grad_log_prob.item<double>(), 0.05);
  const LossResult k3 = with_kl("low_var_kl", -1.0, -1.0, -1.5);
  EXPECT_DOUBLE_EQ(k3.grad_log_prob.item<double>(), 0.1 * (1.0 - std::exp(-0.5)));
  EXPECT_EQ(with_kl("k3", 0.0, 0.0, 90.0).grad_log_prob.item<double>(), 0.0);
}

TEST(Kl, PlusKeepsTheValueAndTakesTheGradientOfK2TimesTheRatio) {
  const LossResult result = with_kl("k1+", -1.0, -1.2, -1.5);
  const double rho = std::exp(0.2);
  EXPECT_NEAR(result.metrics.kl_loss, rho * 0.5, 1e-15);
  EXPECT_NEAR(result.grad_log_prob.item<double>(), 0.1 * rho * 0.5, 1e-15);
}

TEST(ActorLoss, EntropyBonusGivesItsOwnGradient) {
  LossOptions options;
  options.entropy_coeff = 0.01;
  LossTokens tokens = make_tokens({-1.0, -2.0, -3.0}, {}, {1.0, 1.0, 1.0});
  tokens.mask = at::tensor({1.0, 0.0, 1.0}, at::kDouble);
  tokens.entropy = at::tensor({2.0, 9.0, 4.0}, at::kDouble);
  const LossResult result = actor_loss(tokens, {.num_tokens = 4.0}, options);
  EXPECT_DOUBLE_EQ(result.metrics.entropy_loss, 1.5);
  EXPECT_DOUBLE_EQ(result.metrics.entropy_sum, 6.0);
  EXPECT_DOUBLE_EQ(result.metrics.pg_loss, -0.5);
  EXPECT_DOUBLE_EQ(result.metrics.loss, -0.515);
  EXPECT_EQ(to_vector(result.grad_entropy), (Values{-0.0025, 0.0, -0.0025}));
  options.entropy_coeff = 0.0;
  EXPECT_FALSE(actor_loss(tokens, {.num_tokens = 4.0}, options).grad_entropy.defined());
}

TEST(ActorLoss, UncountedTokensCannotSpoilTheGradient) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  LossTokens tokens = make_tokens({-1.0, nan}, {-1.0, nan}, {1.0, nan});
  tokens.mask = at::tensor({1.0, 0.0}, at::kDouble);
  const LossResult result = actor_loss(tokens, {.num_tokens = 1.0}, {});
  EXPECT_EQ(to_vector(result.grad_log_prob), (Values{-1.0, 0.0}));
  EXPECT_EQ(result.metrics.loss, -1.0);
}

TEST(ActorLoss, BlocksAddUpToTheWholeBatch) {
  LossOptions options;
  options.loss_agg_mode = "seq-mean-token-mean";
  const LossScale scale{.num_tokens = 5.0, .num_sequences = 2.0};
  LossTokens whole = make_tokens(
      {-1.0, -2.0, -0.5, -0.25, -3.0}, {-1.1, -2.2, -0.5, -0.2, -3.5}, {1, 1, -2, -2, -2});
  whole.offsets = {0, 2, 5};
  const LossResult both = actor_loss(whole, scale, options);
  const LossResult first =
      actor_loss(make_tokens({-1.0, -2.0}, {-1.1, -2.2}, {1, 1}), scale, options);
  const LossResult second = actor_loss(
      make_tokens({-0.5, -0.25, -3.0}, {-0.5, -0.2, -3.5}, {-2, -2, -2}), scale, options);
  EXPECT_NEAR(both.metrics.loss, first.metrics.loss + second.metrics.loss, 1e-15);
  Values joined = to_vector(first.grad_log_prob);
  for (const double g : to_vector(second.grad_log_prob)) joined.push_back(g);
  EXPECT_EQ(to_vector(both.grad_log_prob), joined);
}

TEST(ActorLoss, GradientsComeInTheTypeOfTheLogProbabilities) {
  LossTokens tokens = make_tokens({-1.0}, {}, {1.0});
  tokens.log_prob = tokens.log_prob.to(at::kFloat);
  EXPECT_EQ(actor_loss(tokens, {}, token_sum()).grad_log_prob.scalar_type(), at::kFloat);
  EXPECT_EQ(actor_loss(make_tokens({}, {}, {}), {}, {}).grad_log_prob.numel(), 0);
}

TEST(ActorLoss, WorksUnderInferenceMode) {
  const c10::InferenceMode inference;
  const LossResult result = actor_loss(make_tokens({-1.0}, {-1.0}, {2.0}), {}, token_sum());
  EXPECT_EQ(result.grad_log_prob.item<double>(), -2.0);
}

void expect_refused(const LossOptions& options, const std::string& text) {
  try {
    check_loss_options(options);
    ADD_FAILURE() << "accepted, wanted: " << text;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(LossOptions, BadValuesAreNamed) {
  check_loss_options({});
  LossOptions options;
  options.loss_mode = "vanila";
  expect_refused(options, "[actor.policy_loss.loss_mode] wanted one of cispo, clip_cov");
  options = {};
  options.loss_agg_mode = "mean";
  expect_refused(options, "[actor.loss_agg_mode] wanted one of token-mean");
  options = {};
  options.clip_ratio_low = -0.1;
  expect_refused(options, "[actor.clip_ratio_low] wanted a finite number >= 0, got -0.1");
  options = {};
  options.clip_ratio_c = 1.0;
  expect_refused(options, "[actor.clip_ratio_c] wanted a finite number > 1, got 1");
  options = {};
  options.kl_loss_type = "k1";
  check_loss_options(options);  // not read while use_kl_loss is off
  options.use_kl_loss = true;
  expect_refused(options, "[actor.kl_loss_type] wanted a loss with a gradient, got 'k1'");
  options.kl_loss_type = "k1+";
  check_loss_options(options);
  options.kl_loss_type = "full";
  expect_refused(options, "[actor.kl_loss_type] wanted one of abs");
}

}  // namespace
}  // namespace banyan::algo
