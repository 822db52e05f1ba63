// The five modes on three sequences: z = (1 2 3 | 4 5 | 6), mask (1 1 0 | 1 1 | 0), so n = 2, 2, 0.
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "banyan/algo/loss.h"

namespace banyan::algo {
namespace {

LossTokens three_sequences() {
  LossTokens tokens;
  tokens.mask = at::tensor({1.0, 1.0, 0.0, 1.0, 1.0, 0.0}, at::kDouble);
  tokens.offsets = {0, 3, 5, 6};
  return tokens;
}

double agg(const std::string& mode) {
  const at::Tensor z = at::tensor({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, at::kDouble);
  const LossScale scale{.num_tokens = 8.0, .num_sequences = 4.0, .sequence_norm = 10.0};
  return aggregate(z, three_sequences(), mode, scale).item<double>();
}

TEST(Aggregate, TokenMean) { EXPECT_DOUBLE_EQ(agg("token-mean"), 12.0 / 8.0); }
TEST(Aggregate, TokenSum) { EXPECT_DOUBLE_EQ(agg("token-sum"), 12.0); }
TEST(Aggregate, SeqMeanTokenSum) { EXPECT_DOUBLE_EQ(agg("seq-mean-token-sum"), 12.0 / 4.0); }
TEST(Aggregate, SeqMeanTokenSumNorm) { EXPECT_DOUBLE_EQ(agg("seq-mean-token-sum-norm"), 0.3); }
TEST(Aggregate, SeqMeanTokenMean) {
  EXPECT_DOUBLE_EQ(agg("seq-mean-token-mean"), (1.5 + 4.5) / 4.0);
}

TEST(Aggregate, NothingCountedIsZero) {
  LossTokens tokens = three_sequences();
  tokens.mask.zero_();
  for (const char* mode : {"token-mean", "seq-mean-token-mean", "seq-mean-token-sum"}) {
    EXPECT_EQ(aggregate(at::tensor({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, at::kDouble), tokens, mode, {})
                  .item<double>(),
              0.0);
  }
}

TEST(Aggregate, UnknownModeIsRefused) { EXPECT_THROW(agg("token_mean"), std::invalid_argument); }

}  // namespace
}  // namespace banyan::algo
