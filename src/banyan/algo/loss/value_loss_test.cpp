#include "banyan/algo/value_loss.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>

#include "banyan/algo/sft_loss.h"

namespace banyan::algo {
namespace {

using Values = std::vector<double>;

Values to_vector(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kDouble).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()};
}

ValueTokens make_tokens(const Values& value, const Values& old_value, const Values& returns) {
  ValueTokens tokens;
  tokens.value = at::tensor(value, at::kDouble);
  tokens.old_value = at::tensor(old_value, at::kDouble);
  tokens.returns = at::tensor(returns, at::kDouble);
  tokens.mask = at::ones({static_cast<int64_t>(value.size())}, at::kDouble);
  tokens.offsets = {0, static_cast<int64_t>(value.size())};
  return tokens;
}

TEST(ValueLoss, TakesTheLargerOfPlainAndClippedError) {
  // Range 0.5, N = 4:
  // V 1, before 1, R 3: plain 4, clipped 4; gradient (1 - 3) / 4.
  // V 2, before 1, R 3: plain 1, clipped (1.5 - 3)^2 = 2.25 is larger: flat.
  // V 2, before 1, R 0: plain 4, clipped 2.25: plain, gradient 2 / 4.
  // Masked: anything.
  ValueTokens tokens =
      make_tokens({1.0, 2.0, 2.0, NAN}, {1.0, 1.0, 1.0, 0.0}, {3.0, 3.0, 0.0, 0.0});
  tokens.mask = at::tensor({1.0, 1.0, 1.0, 0.0}, at::kDouble);
  const ValueLossResult result = value_loss(tokens, {.num_tokens = 4.0}, {});
  EXPECT_DOUBLE_EQ(result.loss, 0.5 * (4.0 + 2.25 + 4.0) / 4.0);
  EXPECT_EQ(result.clipped_tokens, 1.0);
  EXPECT_DOUBLE_EQ(result.value_sum, 5.0);
  EXPECT_EQ(to_vector(result.grad_value), (Values{-0.5, 0.0, 0.5, 0.0}));
}

TEST(ValueLoss, AggregatesLikeTheActor) {
  ValueTokens tokens = make_tokens({1.0, 2.0, 4.0}, {1.0, 2.0, 4.0}, {0.0, 0.0, 0.0});
  tokens.offsets = {0, 2, 3};
  ValueLossOptions options;
  options.loss_agg_mode = "seq-mean-token-mean";
  const LossScale scale{.num_tokens = 3.0, .num_sequences = 2.0};
  EXPECT_DOUBLE_EQ(value_loss(tokens, scale, options).loss, 0.5 * ((1.0 + 4.0) / 2.0 + 16.0) / 2.0);
  options.loss_agg_mode = "mean";
  EXPECT_THROW(check_value_loss_options(options), std::invalid_argument);
  options = {.cliprange_value = 0.0};
  EXPECT_THROW(check_value_loss_options(options), std::invalid_argument);
}

TEST(ValueLoss, ExplainedVariance) {
  // R = 0, 1, 2 (variance 1); R - V = 0, 0, 1 (variance 1/3).
  EXPECT_DOUBLE_EQ(explained_variance({{0.0, 1.0}, {1.0}}, {{0.0, 1.0}, {2.0}}),
                   1.0 - (1.0 / 3.0) / (1.0 + 1e-5));
  EXPECT_EQ(explained_variance({{0.0}}, {{1.0}}), 0.0);
}

TEST(SftLoss, WeighsAndDividesByTheMiniBatch) {
  const at::Tensor log_prob = at::tensor({-1.0, -2.0, std::nan("")}, at::kDouble);
  const SftResult result = sft_loss(log_prob, at::tensor({1.0, 0.5, 0.0}, at::kDouble), 4.0);
  EXPECT_DOUBLE_EQ(result.loss, (1.0 + 1.0) / 4.0);
  EXPECT_EQ(to_vector(result.grad), (Values{-0.25, -0.125, 0.0}));
  EXPECT_DOUBLE_EQ(sft_loss(at::tensor({-1.0, -2.0}, at::kDouble), {}, 2.0).loss, 1.5);
  EXPECT_EQ(sft_loss(at::tensor({-1.0}, at::kDouble), {}, 0.0).loss, 0.0);
}

}  // namespace
}  // namespace banyan::algo
