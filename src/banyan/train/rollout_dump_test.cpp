// Rollouts kept by one run and taken by another: the same responses, whatever else differs.
#include "banyan/train/rollout_dump.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "banyan/testing/layout_run.h"

namespace banyan::train {
namespace {

using testing::Ended;
using testing::run_layout;
using testing::ScratchDir;

Config config_of(const ScratchDir& scratch, const std::string& model) {
  Config config = testing::tiny_config(model, scratch / "first");
  config.trainer.total_training_steps = 3;
  config.num_train_rows = 12;
  config.skip_rollout = {
      .enable = true, .dump_dir = scratch / "rollouts", .steps = {1, 3}, .action = "cache"};
  return config;
}

void expect_same(const Ended& a, const Ended& b) {
  ASSERT_EQ(a.trajectories.size(), b.trajectories.size());
  for (size_t i = 0; i < a.trajectories.size(); ++i) {
    const Trajectory& x = a.trajectories[i];
    const Trajectory& y = b.trajectories[i];
    EXPECT_EQ(x.row, y.row);
    EXPECT_EQ(x.index, y.index);
    EXPECT_EQ(x.response, y.response);
    EXPECT_EQ(x.response_mask, y.response_mask);
    EXPECT_EQ(x.rollout_log_probs, y.rollout_log_probs);
    EXPECT_EQ(x.finish, y.finish);
  }
}

std::string refusal(Config config, const std::function<void(Config&)>& change) {
  change(config);
  try {
    run_layout(1, config);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST(RolloutDump, WhatARunKeptIsTakenUnderAnotherLayoutAndRate) {
  const ScratchDir scratch("rollout-dump");
  Config config = config_of(scratch, testing::write_tiny_model(scratch));
  const Ended first = run_layout(1, config)[0];
  EXPECT_TRUE(std::filesystem::exists(scratch / "rollouts/1.json"));
  EXPECT_FALSE(std::filesystem::exists(scratch / "rollouts/2.json"));
  EXPECT_TRUE(std::filesystem::exists(scratch / "rollouts/3.json"));

  config.trainer.default_local_dir = scratch / "again";
  expect_same(run_layout(1, config)[0], first);
  EXPECT_EQ(testing::masters(scratch / "again/global_step_3")
                .begin()
                ->second.equal(testing::masters(scratch / "first/global_step_3").begin()->second),
            true);

  // Other weights would draw others.
  config.trainer.default_local_dir = scratch / "other";
  config.actor.optim.lr = 1e-4;
  expect_same(run_layout(2, config)[0], first);
}

TEST(RolloutDump, WhatDoesNotFitIsRefusedByName) {
  const ScratchDir scratch("rollout-dump-refused");
  Config config = config_of(scratch, testing::write_tiny_model(scratch));
  config.trainer.total_training_steps = 1;
  run_layout(1, config);
  config.trainer.resume_mode = "disable";
  const auto expect_refused = [&](const std::string& text,
                                  const std::function<void(Config&)>& change) {
    const std::string said = refusal(config, change);
    EXPECT_NE(said.find(text), std::string::npos) << said;
  };
  expect_refused("wanted responses to the prompt of row",
                 [](Config& other) { other.train_batch_size = 6; });
  expect_refused("wanted response 4 to row", [](Config& other) { other.rollout.train.n = 5; });
  expect_refused("wanted responses of at most data.max_response_length (2) tokens",
                 [](Config& other) { other.rollout.response_length = 2; });
  expect_refused("[config] skip.rollout.dump_dir: wanted a folder",
                 [](Config& other) { other.skip_rollout.dump_dir.reset(); });
  expect_refused("[config] skip.rollout.steps: wanted the steps",
                 [](Config& other) { other.skip_rollout.steps.clear(); });
  expect_refused("[config] skip.rollout.enable: wanted false with rollout.over_sample_rate",
                 [](Config& other) { other.rollout.over_sample_rate = 0.5; });
}

// Greedy baselines (remax) are kept behind the sampled responses.
TEST(RolloutDump, BaselinesAreTakenAsTheyWereKept) {
  const ScratchDir scratch("rollout-dump-greedy");
  Config config = config_of(scratch, testing::write_tiny_model(scratch));
  config.algorithm.adv_estimator = "remax";
  config.trainer.total_training_steps = 1;
  const Ended first = run_layout(1, config)[0];
  config.trainer.default_local_dir = scratch / "again";
  const Ended again = run_layout(1, config)[0];
  for (const char* name : {"actor/loss", "actor/grad_norm", "critic/advantages/mean"}) {
    EXPECT_EQ(again.logged.at(1).at(name), first.logged.at(1).at(name)) << name;
  }
}

// Then they would not go the same way: one would generate, alone where they do so together.
TEST(RolloutDump, AFileThatOneRankDoesNotSeeIsNamed) {
  const ScratchDir scratch("rollout-dump-elsewhere");
  Config config = config_of(scratch, testing::write_tiny_model(scratch));
  config.trainer.total_training_steps = 1;
  run_layout(1, config);
  config.trainer.resume_mode = "disable";
  std::string said;
  try {
    testing::run_mesh(2, mesh_shape(config), [&](parallel::Groups& groups) {
      Config own = config;
      if (groups.world.is_first()) own.skip_rollout.dump_dir = scratch / "elsewhere";
      testing::FakeHost host(testing::tiny_prompts(own.num_train_rows), testing::thirds);
      train(own, host, nullptr, &groups);
    });
  } catch (const std::exception& error) {
    said = error.what();
  }
  EXPECT_NE(said.find("elsewhere/1.json"), std::string::npos) << said;
}

}  // namespace banyan::train
