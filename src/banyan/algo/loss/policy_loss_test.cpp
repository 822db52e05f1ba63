// The policy losses on one or two tokens, values and gradients worked out by hand (aggregation
// token-sum, so every weight is 1, unless the loss forces its own).
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>

#include "banyan/algo/loss.h"

namespace banyan::algo {
namespace {

using Values = std::vector<double>;

LossTokens make_tokens(const Values& log_prob, const Values& old, const Values& advantage) {
  LossTokens tokens;
  tokens.log_prob = at::tensor(log_prob, at::kDouble);
  tokens.old_log_prob = at::tensor(old, at::kDouble);
  tokens.advantage = at::tensor(advantage, at::kDouble);
  tokens.mask = at::ones_like(tokens.log_prob);
  tokens.offsets = {0, static_cast<int64_t>(log_prob.size())};
  return tokens;
}

LossOptions mode(const std::string& name) {
  LossOptions options;
  options.loss_mode = name;
  options.clip_ratio_high = 0.3;
  if (policy_loss(name).forced_aggregation.empty()) options.loss_agg_mode = "token-sum";
  if (name == "dro") options.dro_beta = 0.5;
  return options;
}

Values to_vector(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kDouble).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()};
}

LossResult run(const LossTokens& tokens, const LossOptions& options) {
  return actor_loss(tokens, loss_scale(tokens, 1.0), options);
}

void expect_values(const at::Tensor& got, const Values& wanted) {
  const Values values = to_vector(got);
  ASSERT_EQ(values.size(), wanted.size());
  for (size_t u = 0; u < wanted.size(); ++u) EXPECT_NEAR(values[u], wanted[u], 1e-13) << u;
}

// One token with probability p now and q before, advantage a.
LossResult one(const std::string& name, double p, double q, double a) {
  return run(make_tokens({std::log(p)}, {std::log(q)}, {a}), mode(name));
}

TEST(DppoTv, MasksTokensThatMovedTooFar) {
  // p 0.5 from 0.25: gap 0.25 <= eH, rho 2: L = -A 2 log(0.5), gradient -2 A.
  LossResult result = one("dppo_tv", 0.5, 0.25, 3.0);
  EXPECT_NEAR(result.metrics.pg_loss, -6.0 * std::log(0.5), 1e-13);
  expect_values(result.grad_log_prob, {-6.0});
  EXPECT_EQ(result.metrics.clipped_tokens, 0.0);
  // p 0.75 from 0.25: gap 0.5 > eH: masked. With A < 0 only a fall below -eL = -0.2 is.
  EXPECT_EQ(one("dppo_tv", 0.75, 0.25, 3.0).metrics.clipped_tokens, 1.0);
  EXPECT_EQ(one("dppo_tv", 0.75, 0.25, -3.0).metrics.clipped_tokens, 0.0);
  EXPECT_EQ(one("dppo_tv", 0.25, 0.5, -3.0).metrics.clipped_tokens, 1.0);
  expect_values(one("dppo_tv", 0.25, 0.5, -3.0).grad_log_prob, {0.0});
}

TEST(DppoTv, RatioIsCappedAtTwenty) {
  // rho = 0.25 / 0.005 = 50 inside the mask: the cap 20 holds (T2), not clip_ratio_c = 3.
  const LossResult result = one("dppo_tv", 0.25, 0.005, 1.0);
  expect_values(result.grad_log_prob, {-20.0});
  EXPECT_EQ(result.metrics.clipped_lower_tokens, 1.0);
}

TEST(DppoKl, MasksByBinaryKl) {
  // p 0.5, q 0.25: K = 0.25 log(0.25 / 0.5) + 0.75 log(0.75 / 0.5) = 0.1308 <= eH 0.3: kept.
  expect_values(one("dppo_kl", 0.5, 0.25, 1.0).grad_log_prob, {-2.0});
  // p 0.9, q 0.25: K = 0.25 log(0.25/0.9) + 0.75 log(0.75/0.1) = 1.19: masked for A > 0, kept for A
  // < 0 since p >= q.
  EXPECT_EQ(one("dppo_kl", 0.9, 0.25, 1.0).metrics.clipped_tokens, 1.0);
  EXPECT_EQ(one("dppo_kl", 0.9, 0.25, -1.0).metrics.clipped_tokens, 0.0);
  // p 0.1, q 0.75: K = 0.75 log 7.5 + 0.25 log(0.25 / 0.9) = 1.19 > eL: masked for A < 0 only.
  EXPECT_EQ(one("dppo_kl", 0.1, 0.75, -1.0).metrics.clipped_tokens, 1.0);
  EXPECT_EQ(one("dppo_kl", 0.1, 0.75, 1.0).metrics.clipped_tokens, 0.0);
}

TEST(Gspo, RatioOfTheSequence) {
  // x = 0.2, 0.0: s = 0.1, ratio e^0.1 = 1.105 < 1.3. L = mean of -2 e^0.1; each token's gradient
  // is -2 e^0.1 / 2 (the gradient flows through its own l only).
  const LossTokens tokens = make_tokens({-1.0, -2.0}, {-1.2, -2.0}, {2.0, 2.0});
  const LossResult result = run(tokens, mode("gspo"));
  const double ratio = std::exp(0.1);
  EXPECT_NEAR(result.metrics.pg_loss, -2.0 * ratio, 1e-13);
  expect_values(result.grad_log_prob, {-ratio, -ratio});
  // s = 0.5: e^0.5 = 1.65 > 1.3 clips both tokens.
  const LossResult clipped = run(make_tokens({-1.0, -2.0}, {-2.0, -2.0}, {2.0, 2.0}), mode("gspo"));
  EXPECT_NEAR(clipped.metrics.pg_loss, -2.6, 1e-13);
  EXPECT_EQ(clipped.metrics.clipped_tokens, 2.0);
  expect_values(clipped.grad_log_prob, {0.0, 0.0});
}

TEST(Gspo, ExponentIsClampedAtTwenty) {
  const LossResult result = run(make_tokens({0.0}, {-400.0}, {-1.0}), mode("gspo"));
  EXPECT_NEAR(result.metrics.pg_loss, std::exp(20.0), 1e-6);  // no dual clip
}

TEST(Sapo, SoftGate) {
  // rho = 1.5, A = 2, tau 1: L = -2 s(0.5) 4; dL/dl = -2 * 4 s(0.5) (1 - s(0.5)) rho.
  const double gate = 1.0 / (1.0 + std::exp(-0.5));
  const LossResult result = one("sapo", 0.75, 0.5, 2.0);
  EXPECT_NEAR(result.metrics.pg_loss, -8.0 * gate, 1e-13);
  expect_values(result.grad_log_prob, {-8.0 * gate * (1.0 - gate) * 1.5});
  // A < 0: tau 1.05: L = 2 s(1.05 * 0.5) 4 / 1.05.
  const double other = 1.0 / (1.0 + std::exp(-0.525));
  EXPECT_NEAR(one("sapo", 0.75, 0.5, -2.0).metrics.pg_loss, 8.0 * other / 1.05, 1e-13);
}

TEST(Gpg, IsThePlainPolicyGradient) {
  const LossResult result = one("gpg", 0.5, 0.25, 3.0);
  EXPECT_NEAR(result.metrics.pg_loss, -3.0 * std::log(0.5), 1e-13);
  expect_values(result.grad_log_prob, {-3.0});
}

TEST(Cispo, ClippedRatioWeighsTheLogProbability) {
  // rho 2 -> 1.3: L = -1.3 * 3 log 0.5, gradient -3.9: not flat.
  const LossResult result = one("cispo", 0.5, 0.25, 3.0);
  EXPECT_NEAR(result.metrics.pg_loss, -3.9 * std::log(0.5), 1e-13);
  expect_values(result.grad_log_prob, {-3.9});
  EXPECT_EQ(result.metrics.clipped_tokens, 1.0);
}

TEST(Dro, QuadraticPenalty) {
  // x = 0.5, beta 0.5: L = -(2 * -1 - 0.25 * 0.25) = 2.0625; gradient -2 + 0.5 * 0.5.
  const LossResult result = run(make_tokens({-1.0}, {-1.5}, {2.0}), mode("dro"));
  EXPECT_NEAR(result.metrics.pg_loss, 2.0625, 1e-13);
  expect_values(result.grad_log_prob, {-1.75});
}

TEST(GeoMean, OneSidedClampsAndTheMeanOverSequences) {
  // A = 1: y = min(x, clamp(x, -0.2, 0.3)): x = 0.5 -> 0.3, x = -0.4 -> -0.4. Mean -0.05.
  // L_1 = -exp(-0.05); the clamped token has no gradient, the other -exp(-0.05) / 2.
  LossTokens tokens = make_tokens({-1.0, -1.0, -1.0}, {-1.5, -0.6, -0.5}, {1.0, 1.0, -2.0});
  tokens.offsets = {0, 2, 3};
  // Sequence 2: A = -2, x = -0.5 -> max(-0.5, -0.2) = -0.2: L_2 = 2 exp(-0.2). B = 2.
  const LossResult result = run(tokens, mode("geo_mean"));
  EXPECT_NEAR(result.metrics.pg_loss, (-std::exp(-0.05) + 2.0 * std::exp(-0.2)) / 2.0, 1e-13);
  expect_values(result.grad_log_prob, {0.0, -std::exp(-0.05) / 4.0, 0.0});
  EXPECT_EQ(result.metrics.clipped_tokens, 1.0);
  EXPECT_EQ(result.metrics.clipped_lower_tokens, 1.0);
}

TEST(GeoMean, WeightsEnterAsTheirGeometricMean) {
  LossTokens tokens = make_tokens({-1.0, -1.0}, {-1.0, -1.0}, {1.0, 1.0});
  tokens.weight = at::tensor({4.0, 1.0}, at::kDouble);
  EXPECT_NEAR(run(tokens, mode("geo_mean")).metrics.pg_loss, -2.0, 1e-13);
  tokens.weight = at::tensor({0.0, 1.0}, at::kDouble);
  EXPECT_EQ(run(tokens, mode("geo_mean")).metrics.pg_loss, 0.0);
}

// Four tokens with A = +-1 and l chosen so that covariances are 3, 1, 1, 3 (means: A 0, l -2).
LossTokens covariance_case() {
  LossTokens tokens =
      make_tokens({1.0, -1.0, -3.0, -5.0}, {1.0, -1.0, -3.0, -5.0}, {1.0, 1.0, -1.0, -1.0});
  tokens.offsets = {0, 2, 4};
  return tokens;
}

TEST(ClipCov, DropsRandomTokensInsideTheBand) {
  LossOptions options = mode("clip_cov");
  options.clip_cov_lb = 2.0;  // candidates: tokens 0 and 3
  LossResult result = run(covariance_case(), options);
  EXPECT_EQ(result.metrics.clipped_tokens, 1.0);  // max(1, int(0.0002 * 4))
  const Values grad = to_vector(result.grad_log_prob);
  EXPECT_EQ((grad[0] == 0.0) + (grad[3] == 0.0), 1);
  EXPECT_EQ(grad[1], -1.0);
  EXPECT_EQ(grad[2], 1.0);
  options.clip_cov_ratio = 0.5;  // two tokens: both candidates
  result = run(covariance_case(), options);
  expect_values(result.grad_log_prob, {0.0, -1.0, 1.0, 0.0});
  options.clip_cov_lb = 3.0;  // the band is open: nothing inside
  EXPECT_EQ(run(covariance_case(), options).metrics.clipped_tokens, 0.0);
}

TEST(ClipCov, TheChoiceDependsOnItsKeyAloneNotOnTheOrderOfSequences) {
  LossOptions options = mode("clip_cov");
  options.clip_cov_lb = 2.0;
  LossTokens tokens = covariance_case();
  tokens.sequence = {7, 4};
  LossTokens swapped =
      make_tokens({-3.0, -5.0, 1.0, -1.0}, {-3.0, -5.0, 1.0, -1.0}, {-1.0, -1.0, 1.0, 1.0});
  swapped.offsets = {0, 2, 4};
  swapped.sequence = {4, 7};
  int64_t first = 0, changes = 0;
  for (uint64_t step = 0; step < 40; ++step) {
    options.step = step;
    const Values grad = to_vector(run(tokens, options).grad_log_prob);
    const Values other = to_vector(run(swapped, options).grad_log_prob);
    EXPECT_EQ(grad, (Values{other[2], other[3], other[0], other[1]}));
    first += grad[0] == 0.0 ? 1 : 0;
    options.mini_batch = 1;
    changes += to_vector(run(tokens, options).grad_log_prob) != grad ? 1 : 0;
    options.mini_batch = 0;
  }
  EXPECT_GT(first, 8);  // a fair coin over 40 steps
  EXPECT_LT(first, 32);
  EXPECT_GT(changes, 8);
}

TEST(KlCov, HoldsBackTheTokensOfLargestCovariance) {
  // l_old = l - 0.5 everywhere: rho = e^0.5, |x| = 0.5. Token 0 (cov 3; a tie with 3, the earlier
  // sequence wins) gets + 0.1 |x|: gradient -rho + 0.1.
  LossTokens tokens = covariance_case();
  tokens.old_log_prob = tokens.log_prob - 0.5;
  const LossResult result = run(tokens, mode("kl_cov"));
  const double rho = std::exp(0.5);
  expect_values(result.grad_log_prob, {-rho + 0.1, -rho, rho, rho});
  EXPECT_NEAR(result.metrics.pg_loss, 0.05, 1e-13);
  EXPECT_NEAR(value_of(result.metrics.extra.at("ppo_kl_abs")), 0.5, 1e-13);
  EXPECT_NEAR(result.metrics.neg_log_ratio_sum, -2.0, 1e-13);
}

TEST(PolicyLosses, WeightsMultiplyEveryLoss) {
  for (const std::string& name : policy_losses().names()) {
    LossTokens tokens = make_tokens({-1.0}, {-1.1}, {2.0});
    const double plain = run(tokens, mode(name)).metrics.pg_loss;
    tokens.weight = at::tensor({0.25}, at::kDouble);
    EXPECT_NEAR(run(tokens, mode(name)).metrics.pg_loss, 0.25 * plain, 1e-12) << name;
  }
}

TEST(PolicyLosses, BypassLeavesTheWeightToLossesWithoutARatio) {
  for (const std::string& name : policy_losses().names()) {
    LossTokens tokens = make_tokens({-1.0}, {-1.1}, {2.0});
    LossOptions options = mode(name);
    options.bypass_mode = true;
    const double plain = run(tokens, options).metrics.pg_loss;
    tokens.weight = at::tensor({0.25}, at::kDouble);
    const double factor = policy_losses().get(name).has_ratio ? 1.0 : 0.25;
    EXPECT_NEAR(run(tokens, options).metrics.pg_loss, factor * plain, 1e-12) << name;
  }
}

TEST(PolicyLosses, EveryRatioIsSafe) {
  for (const std::string& name : policy_losses().names()) {
    for (const double old : {-900.0, 900.0}) {
      const LossResult result = run(make_tokens({-1.0}, {old}, {-1.0}), mode(name));
      EXPECT_TRUE(std::isfinite(result.metrics.loss)) << name;
      EXPECT_TRUE(std::isfinite(result.grad_log_prob.item<double>())) << name;
    }
  }
}

TEST(PolicyLosses, MaskedTokensDoNotChangeAnything) {
  for (const std::string& name : policy_losses().names()) {
    LossTokens tokens = make_tokens({-1.0, -2.0}, {-1.1, -1.8}, {2.0, -1.0});
    const LossResult without = run(tokens, mode(name));
    LossTokens padded =
        make_tokens({-1.0, std::nan(""), -2.0}, {-1.1, 5.0, -1.8}, {2.0, 99.0, -1.0});
    padded.mask = at::tensor({1.0, 0.0, 1.0}, at::kDouble);
    const LossResult with = run(padded, mode(name));
    EXPECT_NEAR(with.metrics.loss, without.metrics.loss, 1e-14) << name;
    const Values wanted = to_vector(without.grad_log_prob);
    expect_values(with.grad_log_prob, {wanted[0], 0.0, wanted[1]});
  }
}

TEST(PolicyLosses, CutsBetweenSequencesChangeNothing) {
  const Values l = {-1.0, -0.3, -2.0, -0.7, -1.5, -0.2}, old = {-1.4, -0.2, -1.5, -0.9, -1.5, -0.6};
  const Values a = {1.0, -0.5, 2.0, -1.0, 0.3, -2.0};
  const auto part = [](const Values& values, size_t from, size_t to) {
    return Values(values.begin() + from, values.begin() + to);
  };
  for (const std::string& name : policy_losses().names()) {
    if (policy_losses().get(name).scope == PolicyScope::kMiniBatch) continue;
    LossOptions options = mode(name);
    for (const char* aggregation : {"token-mean", "seq-mean-token-mean", "seq-mean-token-sum"}) {
      if (policy_loss(name).forced_aggregation.empty()) options.loss_agg_mode = aggregation;
      LossTokens whole = make_tokens(l, old, a);
      whole.offsets = {0, 2, 3, 6};
      const LossScale scale = loss_scale(whole, 1.0);
      const LossResult wanted = actor_loss(whole, scale, options);
      LossTokens first = make_tokens(part(l, 0, 3), part(old, 0, 3), part(a, 0, 3));
      first.offsets = {0, 2, 3};
      const LossTokens second = make_tokens(part(l, 3, 6), part(old, 3, 6), part(a, 3, 6));
      const LossResult left = actor_loss(first, scale, options);
      const LossResult right = actor_loss(second, scale, options);
      EXPECT_NEAR(left.metrics.loss + right.metrics.loss, wanted.metrics.loss, 1e-14) << name;
      EXPECT_EQ(left.metrics.clipped_tokens + right.metrics.clipped_tokens,
                wanted.metrics.clipped_tokens)
          << name;
      Values joined = to_vector(left.grad_log_prob);
      for (const double g : to_vector(right.grad_log_prob)) joined.push_back(g);
      EXPECT_EQ(joined, to_vector(wanted.grad_log_prob)) << name;
    }
  }
}

TEST(PolicyLosses, SequenceLossesForceTheirAggregation) {
  for (const char* name : {"gspo", "sapo", "geo_mean"}) {
    LossOptions options = mode(name);
    EXPECT_EQ(aggregation_mode(options), "seq-mean-token-mean");
    check_loss_options(options);
    options.loss_agg_mode = "token-mean";
    try {
      check_loss_options(options);
      ADD_FAILURE() << name;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what())
                    .find("[actor.loss_agg_mode] wanted seq-mean-token-mean (or null) with "
                          "policy_loss.loss_mode=" +
                          std::string(name)),
                std::string::npos)
          << error.what();
    }
  }
  EXPECT_EQ(aggregation_mode({}), "token-mean");
}

TEST(PolicyLosses, BadOptionsAreNamed) {
  const auto refused = [](LossOptions options, const std::string& text) {
    try {
      check_loss_options(options);
      ADD_FAILURE() << "accepted, wanted " << text;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused({.loss_mode = "bypass_mode"}, "algorithm.rollout_correction.bypass_mode=true");
  refused({.loss_mode = "dro"}, "[actor.policy_loss.dro_beta] wanted a finite number > 0, got 0");
  refused({.loss_mode = "sapo", .tau_pos = 0.0}, "[actor.tau_pos] wanted");
  refused({.loss_mode = "dppo_tv", .dppo_ratio_cap = 0.0}, "[actor.policy_loss.dppo_ratio_cap]");
  refused({.loss_mode = "clip_cov", .clip_cov_lb = 5.0}, "[actor.policy_loss.clip_cov_lb] wanted");
  refused({.loss_mode = "kl_cov", .kl_cov_ratio = -1.0}, "[actor.policy_loss.kl_cov_ratio]");
}

}  // namespace
}  // namespace banyan::algo
