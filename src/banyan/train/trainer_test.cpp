// The whole loop on a tiny model: it learns, resumes bit for bit, and keeps its promises about
// ratios.
#include "banyan/train/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "banyan/rollout/engine.h"
#include "banyan/testing/fake_host.h"
#include "banyan/testing/tiny_run.h"

namespace banyan::train {
namespace {

using banyan::testing::FakeHost;
using banyan::testing::masters;
using banyan::testing::ScratchDir;
using banyan::testing::tiny_prompts;

constexpr int32_t kLuckyToken = 7;

Score lucky_share(const Trajectory& trajectory) {
  return testing::share_of_tokens(trajectory, [](int32_t token) { return token == kLuckyToken; });
}

void expect_equal(const std::map<std::string, at::Tensor>& a,
                  const std::map<std::string, at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) EXPECT_TRUE(tensor.equal(b.at(name))) << name;
}

TEST(Train, LearnsToEmitTheRewardedToken) {
  const ScratchDir scratch("learn");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "run");
  config.trainer.total_training_steps = 40;
  FakeHost host(tiny_prompts(), lucky_share);
  const TrainSummary summary = train(config, host);
  EXPECT_EQ(summary.last_step, 40);
  EXPECT_LT(host.logged.at(1).at("critic/score/mean"), 0.2);
  EXPECT_GT(host.logged.at(40).at("critic/score/mean"), 0.6);
  EXPECT_TRUE(std::filesystem::exists(scratch / "run/global_step_40/config.json"));
}

TEST(Train, RolloutAndTrainerAgreeBitForBit) {
  const ScratchDir scratch("gap");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "run");
  FakeHost host(tiny_prompts(), lucky_share);
  train(config, host);
  for (const auto& [step, metrics] : host.logged) {
    EXPECT_EQ(metrics.at("training/rollout_probs_diff_valid"), 1.0);
    EXPECT_EQ(metrics.at("training/rollout_probs_diff_max"), 0.0) << "step " << step;
  }
}

// The built-in engine behind the interface, counting what it is told.
class CountingGenerator final : public rollout::Generator {
 public:
  CountingGenerator(models::CausalLM& actor, std::vector<std::string>& calls)
      : engine_(actor, {.kv_bytes = 1 << 24}), calls_(calls) {}

  rollout::GenerateStats generate(const std::vector<rollout::Prompt>& prompts,
                                  const rollout::SamplingParams& params,
                                  const rollout::OnFinished& on_finished,
                                  const std::function<bool()>& should_stop) override {
    calls_.push_back("generate");
    return engine_.generate(prompts, params, on_finished, should_stop);
  }
  void weights_changed(int64_t version) override {
    calls_.push_back("weights " + std::to_string(version));
    engine_.weights_changed(version);
  }

 private:
  rollout::Engine engine_;
  std::vector<std::string>& calls_;
};

TEST(Train, TellsTheGeneratorOfEveryChangeBeforeItGenerates) {
  const ScratchDir scratch("generator");
  const std::string model = testing::write_tiny_model(scratch);
  Config config = testing::tiny_config(model, scratch / "own");
  config.trainer.total_training_steps = 2;
  config.trainer.val_before_train = true;
  config.trainer.test_freq = 2;
  FakeHost own(tiny_prompts(), lucky_share);
  train(config, own);

  config.trainer.default_local_dir = scratch / "theirs";
  FakeHost theirs(tiny_prompts(), lucky_share);
  std::vector<std::string> calls;
  train(config, theirs, [&calls](models::CausalLM& actor) {
    return std::make_unique<CountingGenerator>(actor, calls);
  });
  const std::vector<std::string> wanted = {"weights 0",
                                           "generate",  // validation
                                           "generate",
                                           "weights 1",
                                           "generate",
                                           "weights 2",
                                           "generate"};  // validation
  EXPECT_EQ(calls, wanted);
  for (const int64_t step : {1, 2}) {
    EXPECT_EQ(theirs.logged.at(step).at("actor/grad_norm"),
              own.logged.at(step).at("actor/grad_norm"));
    EXPECT_GE(theirs.logged.at(step).at("timing_s/update_weights"), 0.0);
  }
}

TEST(Train, FirstMiniBatchRatioIsExactlyOneWithAnOldPass) {
  const ScratchDir scratch("ratio");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "run");
  config.force_old_log_prob = true;
  config.actor.ppo_micro_batch_size_per_gpu = 3;
  config.trainer.total_training_steps = 2;
  FakeHost host(tiny_prompts(), lucky_share);
  train(config, host);
  EXPECT_EQ(host.logged.at(1).at("actor/ratio_deviation_max"), 0.0);
  EXPECT_EQ(host.logged.at(2).at("actor/ratio_deviation_max"), 0.0);
  EXPECT_GT(host.logged.at(1).at("actor/grad_norm"), 0.0);
}

TEST(Train, ResumingGivesTheBitsOfNeverHavingStopped) {
  const ScratchDir scratch("resume");
  const std::string model = testing::write_tiny_model(scratch);
  Config straight = testing::tiny_config(model, scratch / "straight");
  straight.actor.ppo_mini_batch_size = 2;
  straight.actor.ppo_epochs = 2;
  straight.actor.shuffle = true;
  FakeHost undisturbed(tiny_prompts(), lucky_share);
  const TrainSummary whole = train(straight, undisturbed);

  Config stopped = straight;
  stopped.trainer.default_local_dir = scratch / "stopped";
  FakeHost first(tiny_prompts(), lucky_share);
  first.stop_after = 2;
  EXPECT_TRUE(train(stopped, first).stopped_early);
  FakeHost second(tiny_prompts(), lucky_share);
  const TrainSummary resumed = train(stopped, second);
  EXPECT_EQ(resumed.first_step, 2);
  EXPECT_EQ(resumed.last_step, 4);
  expect_equal(masters(whole.checkpoint), masters(resumed.checkpoint));
  for (const int64_t step : {3, 4}) {
    EXPECT_EQ(undisturbed.logged.at(step).at("actor/grad_norm"),
              second.logged.at(step).at("actor/grad_norm"));
  }
}

TEST(Train, SharingDoesNotChangeTheForward) {
  const ScratchDir scratch("share");
  const std::string model = testing::write_tiny_model(scratch);
  std::vector<Metrics> first_step;
  for (const std::string mode : {"on", "off"}) {
    Config config = testing::tiny_config(model, scratch / mode);
    config.sharing.mode = mode;
    config.trainer.total_training_steps = 1;
    FakeHost host(tiny_prompts(), lucky_share);
    train(config, host);
    first_step.push_back(host.logged.at(1));
  }
  EXPECT_EQ(first_step[0].at("critic/score/mean"), first_step[1].at("critic/score/mean"));
  EXPECT_EQ(first_step[0].at("actor/pg_loss"), first_step[1].at("actor/pg_loss"));
  EXPECT_EQ(first_step[0].at("actor/entropy"), first_step[1].at("actor/entropy"));
  EXPECT_GT(first_step[0].at("trie/ratio"), 1.5);
  EXPECT_EQ(first_step[1].at("trie/ratio"), 1.0);
}

TEST(Train, FailedScoresAreLeftOutAndTooManyStopTheRun) {
  const ScratchDir scratch("failed");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "run");
  config.trainer.total_training_steps = 1;
  FakeHost some(tiny_prompts(), [](const Trajectory& trajectory) {
    Score score = lucky_share(trajectory);
    if (trajectory.index == 0 && trajectory.row < 2)
      score = {trajectory.row, 0, true, "timeout", 0.0, {}, {}};
    return score;
  });
  train(config, some);
  EXPECT_EQ(some.logged.at(1).at("reward/failed"), 2.0);

  config.trainer.default_local_dir = scratch / "run2";
  FakeHost most(tiny_prompts(), [](const Trajectory& trajectory) {
    return Score{trajectory.row, trajectory.index, true, "timeout", 0.0, {}, {}};
  });
  EXPECT_THROW(train(config, most), std::invalid_argument);
}

TEST(Train, CountsGroupsOfOneAndEpochsWithoutTheirIncompleteBatch) {
  const ScratchDir scratch("count");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "run");
  config.trainer.total_training_steps = 3;
  config.num_train_rows = 2 * config.train_batch_size + 2;
  FakeHost host(tiny_prompts(), [](const Trajectory& trajectory) {
    Score score = lucky_share(trajectory);
    score.failed = trajectory.row == 0 && trajectory.index > 0;
    return score;
  });
  train(config, host);
  EXPECT_EQ(host.logged.at(1).at("training/single_groups"), 1.0);
  EXPECT_EQ(host.logged.at(2).at("training/single_groups"), 0.0);
  EXPECT_EQ(host.logged.at(2).at("training/epoch"), 0.0);
  EXPECT_EQ(host.logged.at(3).at("training/epoch"), 1.0);
}

TEST(Train, AnOutageOfTheScorerLosesNoStep) {
  const ScratchDir scratch("outage");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "straight");
  FakeHost undisturbed(tiny_prompts(), lucky_share);
  const TrainSummary whole = train(config, undisturbed);

  config.trainer.default_local_dir = scratch / "outage";
  int scored = 0;
  FakeHost failing(tiny_prompts(), [&](const Trajectory& trajectory) {
    Score score = lucky_share(trajectory);
    score.failed = ++scored > 32;  // from the third step on
    return score;
  });
  EXPECT_THROW(train(config, failing), std::invalid_argument);
  EXPECT_TRUE(std::filesystem::exists(scratch / "outage/global_step_2"));
  FakeHost repaired(tiny_prompts(), lucky_share);
  const TrainSummary resumed = train(config, repaired);
  EXPECT_EQ(resumed.first_step, 2);
  expect_equal(masters(whole.checkpoint), masters(resumed.checkpoint));
}

TEST(Train, NonFiniteUpdatesAreSkippedAndCounted) {
  const ScratchDir scratch("nan");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "run");
  config.trainer.total_training_steps = 2;
  FakeHost host(tiny_prompts(), [](const Trajectory& trajectory) {
    Score score = lucky_share(trajectory);
    // A finite reward whose advantage overflows the loss.
    score.value = trajectory.index == 0 ? 1e300 : 0.0;
    return score;
  });
  config.algorithm.norm_adv_by_std_in_grpo = false;
  config.max_nonfinite_steps = 3;
  train(config, host);
  EXPECT_EQ(host.logged.at(1).at("actor/skipped_updates"), 1.0);
  EXPECT_EQ(host.logged.at(2).at("actor/skipped_updates"), 1.0);

  config.max_nonfinite_steps = 1;
  config.trainer.default_local_dir = scratch / "run2";
  EXPECT_THROW(train(config, host), std::invalid_argument);
}

TEST(Train, ValidatesAndSavesAtTheirFrequencies) {
  const ScratchDir scratch("freq");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "run");
  config.trainer.save_freq = 2;
  config.trainer.test_freq = 2;
  config.trainer.val_before_train = true;
  config.trainer.max_actor_ckpt_to_keep = 1;
  FakeHost host(tiny_prompts(), lucky_share);
  train(config, host);
  for (const int64_t step : {0, 2, 4}) {
    EXPECT_TRUE(host.logged.at(step).contains("val-core/reward/mean@1")) << step;
  }
  EXPECT_FALSE(host.logged.at(1).contains("val-core/reward/mean@1"));
  EXPECT_FALSE(std::filesystem::exists(scratch / "run/global_step_2"));
  EXPECT_TRUE(std::filesystem::exists(scratch / "run/global_step_4"));
}

TEST(Train, WrongNamesFailBeforeAModelLoads) {
  const ScratchDir scratch("names");
  Config config = testing::tiny_config("no-such-model", scratch / "run");
  config.actor.policy_loss.loss_mode = "vanila";
  FakeHost host(tiny_prompts(), lucky_share);
  try {
    train(config, host);
    FAIL() << "an unknown loss was accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("vanila"), std::string::npos) << error.what();
  }
}

// sharing.verify computes the gradients twice and changes no number.
TEST(Train, VerifiedSharingTakesTheSameStep) {
  const ScratchDir scratch("verify");
  const std::string model = testing::write_tiny_model(scratch);
  std::map<std::string, at::Tensor> weights[2];
  for (const bool verify : {false, true}) {
    Config config = testing::tiny_config(model, scratch / (verify ? "verified" : "plain"));
    config.trainer.total_training_steps = 3;
    config.sharing.verify = verify ? "every:2" : "off";
    FakeHost host(tiny_prompts(), lucky_share);
    weights[verify] = masters(train(config, host).checkpoint);
    const auto lines = std::count_if(host.said.begin(), host.said.end(), [](const auto& line) {
      return line.find("sharing.verify: gradients with and without sharing differ by") == 0;
    });
    EXPECT_EQ(lines, verify ? 2 : 0);  // updates 0 and 2
  }
  expect_equal(weights[0], weights[1]);
}

// Every pass of a step is observed, the critic's too, and observing changes no number.
TEST(Train, ObservedPassesTakeTheSameStep) {
  const ScratchDir scratch("observe");
  const std::string model = testing::write_tiny_model(scratch);
  std::map<std::string, at::Tensor> weights[2];
  for (const bool observe : {false, true}) {
    Config config = testing::tiny_config(model, scratch / (observe ? "observed" : "plain"));
    config.trainer.total_training_steps = 1;
    config.actor.use_kl_loss = true;
    config.force_old_log_prob = true;
    config.algorithm.adv_estimator = "gae";
    config.sharing.observe = observe ? "layer" : "off";
    FakeHost host(tiny_prompts(), lucky_share);
    weights[observe] = masters(train(config, host).checkpoint);
    const auto count = [&](const std::string& part) {
      return std::count_if(host.said.begin(), host.said.end(), [&](const std::string& line) {
        return line.rfind("[PS]", 0) == 0 && line.find(part) != std::string::npos;
      });
    };
    // Old and reference log-probabilities, values; the critic's update and the actor's.
    const int64_t passes = observe ? 5 : 0;
    EXPECT_EQ(count("PATH 6: sharing detected"), passes);
    EXPECT_EQ(count("] summary: forward_id="), passes);
    EXPECT_EQ(count("] runtime: store_count="), 2 * passes);
    EXPECT_EQ(count("matches_expected=True"), 2 * passes);
    EXPECT_EQ(count("[PS][backend] native attention"), 2 * passes);
  }
  expect_equal(weights[0], weights[1]);
}

}  // namespace
}  // namespace banyan::train
