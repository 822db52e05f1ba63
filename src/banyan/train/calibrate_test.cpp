// The fit, the file, and what a calibrated model predicts of tries it has not seen.
#include "banyan/train/calibrate.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <cmath>

#include "banyan/io/files.h"
#include "banyan/testing/random_trie.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/detail/least_squares.h"
#include "banyan/train/probe.h"
#include "banyan/trie/plan.h"

namespace banyan::train {
namespace {

TEST(LeastSquares, RecoversWhatItWasMadeFrom) {
  const std::vector<std::vector<double>> rows = {{1, 2, 5}, {1, 9, 1}, {1, 4, 4}, {1, 7, 30}};
  std::vector<double> targets;
  for (const auto& row : rows) targets.push_back(3.0 * row[0] + 0.5 * row[1] + 2e-3 * row[2]);
  const std::vector<double> x = detail::non_negative_least_squares(rows, targets);
  EXPECT_NEAR(x[0], 3.0, 1e-9);
  EXPECT_NEAR(x[1], 0.5, 1e-9);
  EXPECT_NEAR(x[2], 2e-3, 1e-9);
}

TEST(LeastSquares, LeavesOutWhatWouldBeNegative) {
  // t = 10 - x has no fit with a slope >= 0: the constant alone, at the mean.
  const std::vector<double> x =
      detail::non_negative_least_squares({{1, 1, 0}, {1, 2, 0}, {1, 3, 0}}, {9, 8, 7});
  EXPECT_NEAR(x[0], 8.0, 1e-9);
  EXPECT_EQ(x[1], 0.0);
  EXPECT_EQ(x[2], 0.0);  // a column of zeros is not determined
}

constexpr const char* kSmallModel =
    R"({"model_type": "llama", "vocab_size": 1024, "hidden_size": 192, "intermediate_size": 512,
        "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": true,
        "initializer_range": 0.05})";

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Processor time of one thread, so that others on the machine matter little.
class Calibrated : public ::testing::Test {
 protected:
  void SetUp() override {
    threads_ = at::get_num_threads();
    at::set_num_threads(1);
    model_ = models::random_model(kSmallModel, 1, {{.dtype = at::kBFloat16}, true});
  }
  void TearDown() override { at::set_num_threads(threads_); }

  double seconds_of(const trie::Plan& plan) {
    double least = 1e9;
    for (int i = 0; i < 3; ++i) {
      const double start = processor_seconds();
      probe_pass(*model_, plan);
      if (i > 0) least = std::min(least, processor_seconds() - start);
    }
    return least;
  }

  int threads_ = 1;
  std::unique_ptr<models::CausalLM> model_;
};

TEST_F(Calibrated, PredictsTriesItHasNotSeen) {
  const double start = processor_seconds();
  const trie::CostModel cost = calibrate(*model_, {.seconds = 1.0, .clock = processor_seconds});
  EXPECT_LT(processor_seconds() - start, 2.0);
  EXPECT_GT(cost.per_block, 0.0);
  EXPECT_GT(cost.per_token, 0.0);
  EXPECT_GT(cost.per_pair, 0.0);
  EXPECT_GT(cost.per_head_row, 0.0);
  EXPECT_GT(cost.per_recomputed_token, 0.1 * cost.per_token);
  EXPECT_LT(cost.per_recomputed_token, 0.7 * cost.per_token);
  EXPECT_EQ(cost.bytes_per_carried_token, 3 * 2 * 64 * (2 + 4));
  std::vector<double> errors;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    testing::RandomTrieOptions options;
    options.seed = seed;
    options.vocab = 1024;
    options.depth = static_cast<int32_t>(seed % 4);
    options.max_fan_out = 8;
    options.max_segment = seed < 5 ? 200 : 60;
    options.max_samples = 24;
    options.scored = seed % 2 == 0 ? 1.0 : 0.3;
    for (const bool share : {true, false}) {
      trie::PlanOptions limits;
      limits.build.share = share;
      limits.max_tokens_per_block = 4000;
      const trie::Plan plan = trie::plan(testing::random_samples(options), limits);
      const double modelled = cost.seconds(trie::counts_of(plan));
      errors.push_back(std::abs(modelled / seconds_of(plan) - 1.0));
    }
  }
  std::sort(errors.begin(), errors.end());
  EXPECT_LT(errors[errors.size() / 2], 0.25) << "worst " << errors.back();
}

TEST_F(Calibrated, LeavesNoGradientBehind) {
  calibrate(*model_, {.seconds = 0.05, .clock = {}});
  for (const Param& param : model_->params().params()) {
    ASSERT_EQ(param.grad.count_nonzero().item<int64_t>(), 0) << param.name;
  }
}

TEST_F(Calibrated, IsMeasuredOncePerModelAndMachine) {
  const testing::ScratchDir scratch("calibrate");
  const std::string file = scratch / "cost.json";
  const trie::CostModel first = calibrate_once(*model_, file);
  const std::string text = io::read_text(file);
  const trie::CostModel again = calibrate_once(*model_, file);
  EXPECT_EQ(again.per_token, first.per_token);
  EXPECT_EQ(again.per_pair, first.per_pair);
  EXPECT_EQ(io::read_text(file), text);
  // Another number of threads, or a file that holds something else: measured again.
  io::write_text_atomic(file, "{\"measured_for\": \"x\"}");
  calibrate_once(*model_, file);
  EXPECT_NE(io::read_text(file).find("per_token"), std::string::npos);
  calibrate_once(*model_, scratch / "no such folder/cost.json");
}

}  // namespace
}  // namespace banyan::train
