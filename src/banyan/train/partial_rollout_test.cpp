// Rollouts that end before every group is whole: what is dropped, what goes on in a later step, and
// that a killed run goes on with it bit for bit.
#include <gtest/gtest.h>

#include <set>

#include "banyan/io/test_support.h"
#include "banyan/testing/fake_host.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/trainer.h"
#include "banyan/train/unfinished.h"

namespace banyan::train {
namespace {

using banyan::testing::FakeHost;
using banyan::testing::ScratchDir;

Score length_score(const Trajectory& trajectory) {
  Score score;
  score.row = trajectory.row;
  score.index = trajectory.index;
  score.value = static_cast<double>(trajectory.response[0] % 2);
  return score;
}

// Four groups a step of six that are started; two groups run at a time, so that some are waiting
// and some are half-way when four are whole.
Config config_of(const std::string& model, const std::string& run) {
  Config config = testing::tiny_config(model, run);
  config.rollout.over_sample_rate = 0.34;
  config.rollout.max_num_seqs = 12;
  config.rollout.response_length = 24;
  config.num_train_rows = 24;
  return config;
}

TEST(PartialRollout, ABatchIsFullAndTheRestIsDropped) {
  const ScratchDir scratch("over_sample");
  const Config config = config_of(testing::write_tiny_model(scratch), scratch / "run");
  FakeHost host(testing::tiny_prompts(24), length_score);
  train(config, host);
  double cut = 0;
  for (const auto& [step, metrics] : host.logged) {
    if (!metrics.contains("rollout/cut_groups")) continue;
    cut += metrics.at("rollout/cut_groups");
    EXPECT_EQ(metrics.at("rollout/resumed_responses"), 0.0);
  }
  EXPECT_GT(cut, 0.0);
  EXPECT_EQ(host.last_trajectories.size(), 16u);
  std::map<int64_t, std::set<int32_t>> indices;
  for (const Trajectory& t : host.last_trajectories) {
    indices[t.row].insert(t.index);
    EXPECT_NE(t.finish, FinishReason::kAbort);
    EXPECT_EQ(t.weight_spans.size(), 1u);
  }
  EXPECT_EQ(indices.size(), 4u);
  for (const auto& [row, seen] : indices) EXPECT_EQ(seen.size(), 4u) << "row " << row;
}

TEST(PartialRollout, WhatWasCutOffGoesOnUnderTheNewWeights) {
  const ScratchDir scratch("partial");
  Config config = config_of(testing::write_tiny_model(scratch), scratch / "run");
  config.partial_rollout = true;
  FakeHost host(testing::tiny_prompts(24), length_score);
  int64_t mixed = 0;
  train(config, host);
  double resumed = 0;
  for (const auto& [step, metrics] : host.logged) {
    if (metrics.contains("rollout/resumed_responses")) {
      resumed += metrics.at("rollout/resumed_responses");
    }
  }
  EXPECT_GT(resumed, 0.0);
  for (const Trajectory& t : host.last_trajectories) {
    EXPECT_EQ(t.prompt.size(), 8u);
    EXPECT_LE(t.response.size(), 24u);
    EXPECT_EQ(t.rollout_log_probs.size(), t.response.size());
    EXPECT_EQ(t.response_mask.size(), t.response.size());
    int32_t end = 0;
    for (const WeightSpan& span : t.weight_spans) {
      EXPECT_EQ(span.start, end);
      end = span.end;
    }
    EXPECT_EQ(end, static_cast<int32_t>(t.response.size()));
    mixed += t.weight_spans.size() > 1;
  }
  EXPECT_GT(mixed, 0);
}

TEST(PartialRollout, AKilledRunGoesOnWithThem) {
  const ScratchDir scratch("partial_resume");
  Config config = config_of(testing::write_tiny_model(scratch), scratch / "straight");
  config.partial_rollout = true;
  FakeHost undisturbed(testing::tiny_prompts(24), length_score);
  const TrainSummary whole = train(config, undisturbed);

  config.trainer.default_local_dir = scratch / "stopped";
  FakeHost first(testing::tiny_prompts(24), length_score);
  first.stop_after = 2;
  EXPECT_TRUE(train(config, first).stopped_early);
  FakeHost second(testing::tiny_prompts(24), length_score);
  const TrainSummary resumed = train(config, second);
  EXPECT_EQ(resumed.first_step, 2);
  const auto a = testing::masters(whole.checkpoint);
  const auto b = testing::masters(resumed.checkpoint);
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) EXPECT_TRUE(tensor.equal(b.at(name))) << name;
}

TEST(PartialRollout, UnfinishedGroupsSurviveAsJson) {
  UnfinishedGroup group;
  group.row = {.row = 17, .tokens = {1, 2, 3}};
  Trajectory& ended = group.ended.emplace_back();
  ended.row = 17;
  ended.index = 2;
  ended.prompt = group.row.tokens;
  ended.response = {4, 5};
  ended.response_mask = {1, 1};
  ended.rollout_log_probs = {-0.1f, -1.0f / 3.0f};
  ended.finish = FinishReason::kLength;
  ended.weight_spans = {{.epoch = 3, .version = "two", .start = 0, .end = 2}};
  Trajectory& cut = group.cut.emplace_back(ended);
  cut.index = 3;
  cut.finish = FinishReason::kAbort;
  cut.sampled_log_probs = {-0.05f, -0.2f};
  const std::vector<UnfinishedGroup> back = unfinished_from_json(to_json({group}), "here");
  ASSERT_EQ(back.size(), 1u);
  EXPECT_EQ(back[0].row.tokens, group.row.tokens);
  EXPECT_EQ(back[0].ended[0].rollout_log_probs, ended.rollout_log_probs);
  EXPECT_EQ(back[0].cut[0].sampled_log_probs, cut.sampled_log_probs);
  EXPECT_EQ(back[0].cut[0].finish, FinishReason::kAbort);
  EXPECT_EQ(back[0].cut[0].weight_spans[0].version, "two");
  EXPECT_EQ(io::file_error_of([] { unfinished_from_json("[{}]", "here"); }).substr(0, 24),
            "here: unfinished groups:");

  std::vector<rollout::Prompt> prompts;
  add_prompts(back[0], prompts);
  ASSERT_EQ(prompts.size(), 1u);
  EXPECT_EQ(prompts[0].tokens, (std::vector<int32_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(prompts[0].original_prompt, 3);
  EXPECT_EQ(prompts[0].first_index, 3);
  Trajectory more;
  more.response = {6};
  more.response_mask = {1};
  more.rollout_log_probs = {-2.0f};
  more.sampled_log_probs = {-1.5f};
  more.weight_spans = {{.epoch = 4, .version = "three", .start = 0, .end = 1}};
  const Trajectory whole = joined(back[0].cut[0], more);
  EXPECT_EQ(whole.response, (std::vector<int32_t>{4, 5, 6}));
  EXPECT_EQ(whole.sampled_log_probs.size(), 3u);
  EXPECT_EQ(whole.weight_spans[1].start, 2);
  EXPECT_EQ(whole.finish, FinishReason::kStop);
}

}  // namespace
}  // namespace banyan::train
