// Training on given text: it learns, it resumes with the same bits, and no cut, no sharing and no
// way to hold the reference changes what is learned.
#include "banyan/train/finetune.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "banyan/testing/fake_finetune_host.h"
#include "banyan/testing/tiny_run.h"

namespace banyan::train {
namespace {

using testing::FakeFinetuneHost;
using testing::masters;
using testing::ScratchDir;

Sample sample(int32_t question, std::vector<int32_t> answer) {
  Sample out;
  out.tokens = {7, 8, 9, 10, 11, static_cast<int32_t>(20 + question)};
  out.scored.assign(out.tokens.size(), 0);
  for (const int32_t token : answer) {
    out.tokens.push_back(token);
    out.scored.push_back(1);
  }
  return out;
}

// Question q is answered by q + 40, 5.
std::vector<Example> answers(int32_t first, int32_t count) {
  std::vector<Example> rows;
  for (int32_t q = first; q < first + count; ++q) rows.push_back({sample(q % 8, {40 + q % 8, 5})});
  return rows;
}

// Answers that hold a 5 are preferred.
std::vector<Example> pairs(int32_t first, int32_t count) {
  std::vector<Example> rows;
  for (int32_t q = first; q < first + count; ++q) {
    rows.push_back({sample(q, {40 + q % 4, 5}), sample(q, {40 + q % 4, 6, 3})});
  }
  return rows;
}

void expect_equal(const std::string& a, const std::string& b) {
  const auto first = masters(a), second = masters(b);
  ASSERT_EQ(first.size(), second.size());
  for (const auto& [name, tensor] : first) EXPECT_TRUE(tensor.equal(second.at(name))) << name;
}

TEST(Finetune, LearnsTheAnswers) {
  const ScratchDir scratch("sft");
  FinetuneConfig config =
      testing::tiny_finetune_config(testing::write_tiny_model(scratch), scratch / "run");
  config.trainer.total_training_steps = 40;
  FakeFinetuneHost host(answers(0, 8), answers(0, 4));
  const TrainSummary summary = finetune(config, host);
  EXPECT_EQ(summary.last_step, 40);
  EXPECT_GT(host.logged.at(1).at("train/loss"), 3.0);
  EXPECT_LT(host.logged.at(40).at("train/loss"), 0.3);
  EXPECT_GT(host.logged.at(0).at("val/loss"), 3.0);
  EXPECT_LT(host.logged.at(40).at("val/loss"), 0.3);
  EXPECT_GT(host.logged.at(1).at("trie/ratio"), 1.3);
  EXPECT_EQ(host.logged.at(1).at("train/num_tokens"), 8.0);
  EXPECT_TRUE(std::filesystem::exists(scratch / "run/global_step_40/config.json"));
}

class FinetuneObjective : public ::testing::TestWithParam<std::string> {};

TEST_P(FinetuneObjective, LearnsWhatIsPreferredBeyondTheTrainingRows) {
  const ScratchDir scratch("pairs");
  FinetuneConfig config =
      testing::tiny_finetune_config(testing::write_tiny_model(scratch), scratch / "run");
  config.preference = testing::tiny_preference(GetParam());
  config.trainer.total_training_steps = 20;
  FakeFinetuneHost host(pairs(0, 8), pairs(8, 4));
  finetune(config, host);
  EXPECT_LT(host.logged.at(20).at("val/loss"), 0.5 * host.logged.at(0).at("val/loss"));
  EXPECT_EQ(host.logged.at(20).at("val/rewards/accuracies"), 1.0);
  EXPECT_GT(host.logged.at(20).at("rewards/margins"), host.logged.at(1).at("rewards/margins"));
}

TEST_P(FinetuneObjective, ResumingGivesTheBitsOfNeverHavingStopped) {
  const ScratchDir scratch("resume");
  FinetuneConfig config =
      testing::tiny_finetune_config(testing::write_tiny_model(scratch), scratch / "straight");
  config.preference = testing::tiny_preference(GetParam());
  FakeFinetuneHost undisturbed(pairs(0, 8), pairs(8, 4));
  const TrainSummary whole = finetune(config, undisturbed);
  config.trainer.default_local_dir = scratch / "stopped";
  FakeFinetuneHost first(pairs(0, 8), pairs(8, 4));
  first.stop_after = 2;
  EXPECT_TRUE(finetune(config, first).stopped_early);
  FakeFinetuneHost second(pairs(0, 8), pairs(8, 4));
  const TrainSummary resumed = finetune(config, second);
  EXPECT_EQ(resumed.first_step, 2);
  expect_equal(whole.checkpoint, resumed.checkpoint);
  EXPECT_EQ(undisturbed.logged.at(6).at("val/loss"), second.logged.at(6).at("val/loss"));
}

// A pair that is cut apart and one that is not give the same loss and gradient: the norm shows it.
TEST_P(FinetuneObjective, CutsAndSharingDoNotChangeTheStep) {
  const ScratchDir scratch("cuts");
  const std::string model = testing::write_tiny_model(scratch);
  std::vector<Metrics> steps;
  for (const int64_t budget : {4096, 24, 11}) {
    for (const std::string mode : {"on", "off"}) {
      FinetuneConfig config =
          testing::tiny_finetune_config(model, scratch / (mode + std::to_string(budget)));
      config.preference = testing::tiny_preference(GetParam());
      config.dtype = "float64";
      config.sharing.mode = mode;
      config.data.max_token_len_per_gpu = budget;
      config.trainer.total_training_steps = 2;
      FakeFinetuneHost host(pairs(0, 8), pairs(8, 4));
      finetune(config, host);
      steps.push_back(host.logged.at(2));
    }
  }
  for (const Metrics& step : steps) {
    for (const char* name : {"train/loss", "train/grad_norm", "rewards/margins", "val/loss"}) {
      EXPECT_NEAR(step.at(name), steps[0].at(name), 1e-10) << name;
    }
  }
}

// In the trie's order both chosen answers come first: blocks of two samples tear every pair.
TEST_P(FinetuneObjective, TornPairsAreRunOnceMoreAndCountOnce) {
  const ScratchDir scratch("torn");
  const std::string model = testing::write_tiny_model(scratch);
  const std::vector<Example> rows = {{sample(1, {40, 5}), sample(1, {60, 5, 6})},
                                     {sample(1, {41, 5}), sample(1, {61})},
                                     {sample(2, {40, 5}), sample(2, {60})},
                                     {sample(2, {41}), sample(2, {61, 9})}};
  std::vector<Metrics> steps;
  for (const bool whole : {true, false}) {
    FinetuneConfig config =
        testing::tiny_finetune_config(model, scratch / (whole ? "whole" : "torn"));
    config.preference = testing::tiny_preference(GetParam());
    config.dtype = "float64";
    config.data.use_dynamic_bsz = whole;
    config.data.micro_batch_size_per_gpu = 1;
    config.trainer.total_training_steps = 2;
    FakeFinetuneHost host(rows, rows);
    finetune(config, host);
    steps.push_back(host.logged.at(2));
  }
  for (const auto& [name, value] : steps[0]) {
    const bool is_result = name.starts_with("rewards/") || name.starts_with("val/") ||
                           name == "train/loss" || name == "train/grad_norm";
    if (!is_result) continue;
    EXPECT_NEAR(value, steps[1].at(name), 1e-10) << name;
  }
  EXPECT_EQ(steps[0].at("trie/computed_tokens"), steps[0].at("trie/unique_tokens"));
  EXPECT_GE(steps[1].at("trie/computed_tokens"), 2 * steps[1].at("trie/unique_tokens"));
}

INSTANTIATE_TEST_SUITE_P(All,
                         FinetuneObjective,
                         ::testing::Values("dpo", "ipo", "reward_model"),
                         [](const auto& info) { return info.param; });

TEST(Finetune, TheReferenceMayBeScoredBeforeTraining) {
  const ScratchDir scratch("reference");
  FinetuneConfig config =
      testing::tiny_finetune_config(testing::write_tiny_model(scratch), scratch / "each");
  config.preference = testing::tiny_preference("dpo");
  FakeFinetuneHost each(pairs(0, 8), pairs(8, 4));
  const TrainSummary whole = finetune(config, each);
  config.trainer.default_local_dir = scratch / "before";
  config.preference->precompute_ref_log_probs = true;
  FakeFinetuneHost before(pairs(0, 8), pairs(8, 4));
  expect_equal(whole.checkpoint, finetune(config, before).checkpoint);
  EXPECT_EQ(each.logged.at(6).at("val/loss"), before.logged.at(6).at("val/loss"));
}

TEST(Finetune, ARewardModelSavesAHeadThatLoads) {
  const ScratchDir scratch("head");
  FinetuneConfig config =
      testing::tiny_finetune_config(testing::write_tiny_model(scratch), scratch / "run");
  config.preference = testing::tiny_preference("reward_model");
  FakeFinetuneHost host(pairs(0, 8), pairs(8, 4));
  const TrainSummary summary = finetune(config, host);
  ASSERT_FALSE(host.said.empty());
  const auto model = models::load_model(summary.checkpoint,
                                        {{.dtype = at::kFloat}, false, models::HeadKind::kValue});
  EXPECT_FALSE(model->value_head().bias.defined());
  EXPECT_TRUE(model->params().contains("score.weight"));
}

TEST(Finetune, ATurnPerSampleWeighsAsOneSampleWithAllTurns) {
  const ScratchDir scratch("turns");
  const std::string model = testing::write_tiny_model(scratch);
  std::vector<Metrics> steps;
  for (const bool each_turn : {false, true}) {
    FinetuneConfig config =
        testing::tiny_finetune_config(model, scratch / (each_turn ? "each" : "whole"));
    config.dtype = "float64";
    config.trainer.total_training_steps = 2;
    std::vector<Example> rows;
    for (int32_t q = 0; q < 4; ++q) {
      Sample whole = sample(q, {41, 5, 50, 51, 42, 5});
      whole.scored[8] = whole.scored[9] = 0;  // 50, 51: the next question
      Sample first = sample(q, {41, 5});
      Sample second = whole;
      second.scored[6] = second.scored[7] = 0;
      rows.push_back(each_turn ? Example{first, second} : Example{whole});
    }
    FakeFinetuneHost host(rows, rows);
    finetune(config, host);
    steps.push_back(host.logged.at(2));
  }
  for (const char* name : {"train/loss", "train/grad_norm", "train/num_tokens", "val/loss"}) {
    EXPECT_NEAR(steps[0].at(name), steps[1].at(name), 1e-10) << name;
  }
  EXPECT_EQ(steps[0].at("trie/unique_tokens"), steps[1].at("trie/unique_tokens"));
  EXPECT_LT(steps[0].at("trie/logical_tokens"), steps[1].at("trie/logical_tokens"));
}

TEST(Finetune, WrongValuesFailBeforeAModelLoads) {
  const ScratchDir scratch("wrong");
  FinetuneConfig config = testing::tiny_finetune_config("no-such-model", scratch / "run");
  config.optim.lr_scheduler_type = "step";
  FakeFinetuneHost host(pairs(0, 8), {});
  EXPECT_THROW(finetune(config, host), std::invalid_argument);
}

}  // namespace
}  // namespace banyan::train
