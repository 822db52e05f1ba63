// Weights, rejection and figures on two sequences worked out by hand.
#include "banyan/algo/correction.h"

#include <gtest/gtest.h>

#include <cmath>

namespace banyan::algo {
namespace {

using Row = std::vector<double>;
using Flags = std::vector<uint8_t>;

// u = log 4, log 0.5 | 0.
const PerToken kOld = {{std::log(0.8), std::log(0.25)}, {std::log(0.5)}};
const PerToken kRollout = {{std::log(0.2), std::log(0.5)}, {std::log(0.5)}};

CorrectionResult run(const CorrectionOptions& options) {
  return correction(kOld, kRollout, options);
}

void expect_row(const Row& got, const Row& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t t = 0; t < got.size(); ++t) EXPECT_NEAR(got[t], wanted[t], 1e-13) << t;
}

double figure(const CorrectionResult& result, const std::string& name) {
  const auto found = result.metrics.find(name);
  EXPECT_NE(found, result.metrics.end()) << name;
  return found == result.metrics.end() ? std::nan("") : value_of(found->second);
}

TEST(Correction, TokenWeightsAreTruncated) {
  const CorrectionResult result = run({.rollout_is = "token", .rollout_is_threshold = "2.0"});
  expect_row(result.weight[0], {2.0, 0.5});
  expect_row(result.weight[1], {1.0});
  EXPECT_TRUE(result.keep.empty());
  EXPECT_NEAR(figure(result, "rollout_is_mean"), 3.5 / 3.0, 1e-13);
  EXPECT_NEAR(figure(result, "rollout_is_max"), 4.0, 1e-13);  // raw (T37)
  EXPECT_NEAR(figure(result, "rollout_is_min"), 0.5, 1e-13);
  EXPECT_NEAR(figure(result, "rollout_is_ratio_fraction_high"), 1.0 / 3.0, 1e-13);
  EXPECT_NEAR(figure(result, "rollout_is_ratio_fraction_low"), 0.0, 1e-13);
  // (sum w)^2 / (count sum w^2) = 12.25 / (3 * 5.25).
  EXPECT_NEAR(figure(result, "rollout_is_eff_sample_size"), 12.25 / 15.75, 1e-13);
  EXPECT_NEAR(figure(result, "rollout_is_seq_mean"), (1.25 + 1.0) / 2.0, 1e-13);
  EXPECT_NEAR(figure(result, "rollout_is_seq_max_deviation"), 0.25, 1e-13);
}

TEST(Correction, SequenceWeightsMultiplyTheTokens) {
  const CorrectionResult result = run({.rollout_is = "sequence", .rollout_is_threshold = "3"});
  expect_row(result.weight[0], {2.0, 2.0});  // 4 * 0.5
  expect_row(result.weight[1], {1.0});
}

TEST(Correction, TwoThresholdsZeroWhatLiesOutside) {
  const CorrectionResult result = run({.rollout_is = "token", .rollout_is_threshold = "0.4_2"});
  expect_row(result.weight[0], {0.0, 0.5});
  EXPECT_NEAR(figure(result, "rollout_is_oob_ratio"), 1.0 / 3.0, 1e-13);
}

TEST(Correction, NormalisesOverTokensOrSequencesAfterTruncation) {
  CorrectionOptions options{
      .rollout_is = "token", .rollout_is_threshold = "2", .rollout_is_batch_normalize = true};
  CorrectionResult result = run(options);
  const double mean = 3.5 / 3.0;
  expect_row(result.weight[0], {2.0 / mean, 0.5 / mean});
  EXPECT_NEAR(figure(result, "rollout_is_batch_norm_factor"), mean, 1e-13);
  options.rollout_is = "sequence";  // weights 2 and 1 of two sequences: mean 1.5
  result = run(options);
  expect_row(result.weight[0], {2.0 / 1.5, 2.0 / 1.5});
  expect_row(result.weight[1], {1.0 / 1.5});
}

TEST(Correction, RejectionComesBeforeNormalisation) {
  // token_k2 of log 4 is 0.96: rejected at 0.5; k2 of log 0.5 is 0.24. Kept weights 0.5 and 1.
  const CorrectionResult result = run({.rollout_is = "token",
                                       .rollout_is_threshold = "2",
                                       .rollout_is_batch_normalize = true,
                                       .rollout_rs = "token_k2",
                                       .rollout_rs_threshold = "0.5"});
  EXPECT_EQ(result.keep[0], (Flags{0, 1}));
  EXPECT_EQ(result.keep[1], (Flags{1}));
  expect_row(result.weight[0], {0.0, 0.5 / 0.75});
  expect_row(result.weight[1], {1.0 / 0.75});
  EXPECT_NEAR(figure(result, "rollout_rs_masked_fraction"), 1.0 / 3.0, 1e-13);
  EXPECT_NEAR(figure(result, "rollout_rs_seq_masked_fraction"), 0.5, 1e-13);
  EXPECT_NEAR(figure(result, "rollout_rs_token_k2_max"), 0.5 * std::pow(std::log(4.0), 2), 1e-13);
}

TEST(Correction, K1BoundsTheRatioOfTrainingToRollout) {
  // 0.3 <= 4, 0.5, 1 <= 2 (T33): the first token fails. Mirrored bounds would pass [0.5, 3.33].
  const auto keep = [](const std::string& rule, const std::string& threshold) {
    return run({.rollout_rs = rule, .rollout_rs_threshold = threshold}).keep;
  };
  EXPECT_EQ(keep("token_k1", "0.3_2")[0], (Flags{0, 1}));
  EXPECT_EQ(keep("token_k1", "0.6_5")[0], (Flags{1, 0}));
  EXPECT_EQ(keep("token_k1", "3")[0], (Flags{0, 1}));      // 1/3 .. 3
  EXPECT_EQ(keep("seq_sum_k1", "1.9")[0], (Flags{0, 0}));  // 4 * 0.5 = 2
  EXPECT_EQ(keep("seq_sum_k1", "2.1")[0], (Flags{1, 1}));
  EXPECT_EQ(keep("seq_mean_k1", "1.4")[0], (Flags{0, 0}));  // sqrt 2
  EXPECT_EQ(keep("seq_mean_k1", "1.5")[0], (Flags{1, 1}));
  EXPECT_EQ(keep("seq_mean_k1", "1.5")[1], (Flags{1}));
}

TEST(Correction, SequenceStatisticsAndSeveralRules) {
  const double k2 = 0.5 * std::pow(std::log(4.0), 2);  // 0.9609
  const double k3 = 4.0 - 1.0 - std::log(4.0);         // 1.6137
  const double k3_second = 0.5 - 1.0 - std::log(0.5);  // 0.1931
  const auto rejects = [](const std::string& rule, double threshold) {
    return run({.rollout_rs = rule, .rollout_rs_threshold = std::to_string(threshold)}).keep[0] ==
           Flags{0, 0};
  };
  EXPECT_TRUE(rejects("seq_max_k2", k2 - 0.01));
  EXPECT_FALSE(rejects("seq_max_k2", k2 + 0.01));
  EXPECT_TRUE(rejects("seq_max_k3", k3 - 0.01));
  EXPECT_FALSE(rejects("seq_max_k3", k3 + 0.01));
  EXPECT_TRUE(rejects("seq_sum_k3", k3 + k3_second - 0.01));
  EXPECT_FALSE(rejects("seq_sum_k3", k3 + k3_second + 0.01));
  EXPECT_TRUE(rejects("seq_mean_k3", (k3 + k3_second) / 2.0 - 0.01));
  EXPECT_FALSE(rejects("seq_mean_k3", (k3 + k3_second) / 2.0 + 0.01));
  const CorrectionResult both =
      run({.rollout_rs = "token_k1, token_k3", .rollout_rs_threshold = "0.6_5,0.18"});
  EXPECT_EQ(both.keep[0], (Flags{0, 0}));  // the second fails k1, the first fails k3
  EXPECT_EQ(both.keep[1], (Flags{1}));
}

TEST(Correction, FiguresOfTheTwoLaws) {
  const CorrectionResult result = run({});
  EXPECT_TRUE(result.weight.empty());
  const double u1 = std::log(4.0), u2 = std::log(0.5);
  EXPECT_NEAR(figure(result, "kl"), -(u1 + u2) / 3.0, 1e-13);
  EXPECT_NEAR(figure(result, "k3_kl"), ((3.0 - u1) + (-0.5 - u2)) / 3.0, 1e-13);
  EXPECT_NEAR(figure(result, "chi2_token"), (16.0 + 0.25 + 1.0) / 3.0 - 1.0, 1e-13);
  EXPECT_NEAR(figure(result, "chi2_seq"), (4.0 + 1.0) / 2.0 - 1.0, 1e-13);
  // Sequence means of l: log sqrt(0.2), log 0.5.
  EXPECT_NEAR(
      figure(result, "training_log_ppl"), -(std::log(0.2) / 2.0 + std::log(0.5)) / 2.0, 1e-13);
  EXPECT_NEAR(figure(result, "training_ppl"), (1.0 / std::sqrt(0.2) + 2.0) / 2.0, 1e-13);
  EXPECT_NEAR(figure(result, "rollout_ppl"), (1.0 / std::sqrt(0.1) + 2.0) / 2.0, 1e-13);
  const double diff = (std::log(0.1) - std::log(0.2)) / 2.0;
  EXPECT_NEAR(figure(result, "log_ppl_diff"), diff / 2.0, 1e-13);
  EXPECT_NEAR(figure(result, "log_ppl_abs_diff"), -diff / 2.0, 1e-13);
  EXPECT_NEAR(figure(result, "log_ppl_diff_max"), 0.0, 1e-13);
  EXPECT_NEAR(figure(result, "log_ppl_diff_min"), diff, 1e-13);
  EXPECT_NEAR(figure(result, "ppl_ratio"), (std::exp(diff) + 1.0) / 2.0, 1e-13);
}

TEST(Correction, PartsOfABatchMergeToTheWhole) {
  const CorrectionOptions options{.rollout_rs = "token_k1", .rollout_rs_threshold = "3"};
  MetricMap merged;
  for (size_t i = 0; i < 2; ++i) {
    merge(correction({kOld[i]}, {kRollout[i]}, options).metrics, merged);
  }
  const CorrectionResult whole = run(options);
  for (const char* name : {"kl",
                           "k3_kl",
                           "chi2_seq",
                           "training_ppl",
                           "log_ppl_diff_min",
                           "rollout_rs_masked_fraction",
                           "rollout_rs_token_k1_mean",
                           "rollout_rs_token_k1_max",
                           "rollout_rs_token_k1_fraction_high"}) {
    EXPECT_NEAR(value_of(merged.at(name)), figure(whole, name), 1e-13) << name;
  }
}

TEST(Correction, WrongWordsAndThresholdsAreNamed) {
  const auto refused = [](const CorrectionOptions& options, const std::string& text) {
    try {
      check_correction_options(options);
      ADD_FAILURE() << "accepted, wanted " << text;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("[algorithm.rollout_correction." + text),
                std::string::npos)
          << error.what();
    }
  };
  refused({.rollout_is = "tokens"}, "rollout_is] wanted token, sequence or null, got 'tokens'");
  refused({.rollout_is = "token"}, "rollout_is_threshold] wanted a number or lo_hi");
  refused({.rollout_is = "token", .rollout_is_threshold = "two"}, "rollout_is_threshold] wanted");
  refused({.rollout_is = "token", .rollout_is_threshold = "2_1"},
          "rollout_is_threshold] wanted lo < hi");
  refused({.rollout_is = "token", .rollout_is_threshold = "-1"}, "rollout_is_threshold] wanted");
  refused({.rollout_rs = "token_k4", .rollout_rs_threshold = "1"}, "rollout_rs] wanted token_k1");
  refused({.rollout_rs = "seq_max_k1", .rollout_rs_threshold = "1"}, "rollout_rs] wanted");
  refused({.rollout_rs = "token_k1"}, "rollout_rs_threshold] wanted a threshold");
  refused({.rollout_rs = "token_k2", .rollout_rs_threshold = "1_2"},
          "rollout_rs_threshold] wanted one upper bound");
  refused({.rollout_rs = "token_k1,token_k2", .rollout_rs_threshold = "2,3,4"},
          "rollout_rs_threshold] wanted one threshold, or one per rule (2), got 3");
  refused({.rollout_rs = "token_k1", .rollout_rs_threshold = "0.5"},
          "rollout_rs_threshold] wanted a number > 1 or lo_hi");
}

}  // namespace
}  // namespace banyan::algo
