// Ranks that only generate beside ranks that train: in the order of one process they give what it
// gives; one batch ahead, what is a step old is so by rule. The ranks are threads here;
// tests/distributed runs the same over processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "banyan/testing/layout_run.h"
#include "banyan/train/trainer_mode.h"

namespace banyan::train {
namespace {

using parallel::Groups;
using testing::FakeHost;
using testing::is_layout;
using testing::masters;
using testing::ScratchDir;
using testing::thirds;
using testing::tiny_prompts;

Config config_of(const ScratchDir& scratch, const std::string& run) {
  Config config = testing::tiny_config(scratch / "model", scratch / run);
  config.rollout.dtype = "float32";
  config.actor.use_kl_loss = true;
  config.actor.ppo_mini_batch_size = 2;
  config.trainer.total_training_steps = 4;
  config.num_train_rows = 20;
  config.trainer.test_freq = 2;
  return config;
}

Config separate(Config config, int64_t num_rollout = 1) {
  config.hybrid_engine = false;
  config.rollout.nnodes = num_rollout;
  return config;
}

Config one_step_off(Config config, int64_t num_rollout = 1) {
  config = separate(std::move(config), num_rollout);
  config.trainer_v1.trainer_mode = "separate_async";
  config.trainer_v1.separate_async.parameter_sync_step =
      config.train_batch_size / config.actor.ppo_mini_batch_size;
  return config;
}

struct Ended {
  std::map<int64_t, Metrics> logged;
  std::vector<Trajectory> trajectories;  // of the last step
  TrainSummary summary;
  std::vector<std::string> said;
};

// What the first rank of `num_train` saw; `prepare` is given every rank's host.
Ended over(int64_t num_train,
           const Config& config,
           const std::function<void(const Groups&, FakeHost&)>& prepare = nullptr) {
  Ended ended;
  testing::run_mesh(num_train + num_rollout_ranks(config), mesh_shape(config), [&](Groups& groups) {
    FakeHost host(tiny_prompts(config.num_train_rows), thirds);
    if (prepare) prepare(groups, host);
    const TrainSummary summary = train(config, host, nullptr, &groups);
    if (only_generates(groups) || !groups.world.is_first()) return;
    ended = {host.logged, host.last_trajectories, summary, host.said};
  });
  return ended;
}

void expect_near(const Ended& got, const Ended& wanted, double bound) {
  ASSERT_EQ(got.logged.size(), wanted.logged.size());
  for (const auto& [step, metrics] : wanted.logged) {
    for (const auto& [name, value] : metrics) {
      if (is_layout(name)) continue;
      ASSERT_TRUE(got.logged.at(step).contains(name)) << name;
      EXPECT_NEAR(got.logged.at(step).at(name), value, bound * std::max(1.0, std::abs(value)))
          << name << " step " << step;
    }
  }
}

void expect_same_weights(const std::string& a, const std::string& b) {
  const auto wanted = masters(b);
  for (const auto& [name, tensor] : masters(a)) EXPECT_TRUE(tensor.equal(wanted.at(name))) << name;
}

std::vector<std::vector<int32_t>> responses(const std::vector<Trajectory>& trajectories) {
  std::vector<std::vector<int32_t>> out;
  for (const Trajectory& t : trajectories) out.push_back(t.response);
  return out;
}

}  // namespace

TEST(SeparateRollout, InTheOrderOfOneProcessItHasItsBits) {
  const ScratchDir scratch("separate");
  testing::write_tiny_model(scratch);
  for (const std::string dtype : {"float32", "bfloat16"}) {
    Config config = config_of(scratch, "one-" + dtype);
    config.rollout.dtype = dtype;
    config.trainer.val_before_train = true;
    const Ended wanted = over(1, config);
    Config two = separate(config);
    two.trainer.default_local_dir = scratch / ("two-" + dtype);
    const Ended got = over(1, two);
    expect_near(got, wanted, 0.0);
    EXPECT_EQ(responses(got.trajectories), responses(wanted.trajectories));
    expect_same_weights(two.trainer.default_local_dir + "/global_step_4",
                        config.trainer.default_local_dir + "/global_step_4");
    // num_warmup_batches = 0 is the same order.
    Config other = one_step_off(config);
    other.trainer_v1.separate_async.num_warmup_batches = 0;
    other.trainer.default_local_dir = scratch / ("other-" + dtype);
    expect_near(over(1, other), wanted, 0.0);
  }
}

TEST(SeparateRollout, WhateverTheCutAndTheNumberOfRanks) {
  const ScratchDir scratch("separate-shapes");
  testing::write_tiny_model(scratch);
  Config config = config_of(scratch, "one");
  config.actor.optim.lr = 1e-3;
  config.trainer.total_training_steps = 3;
  const Ended wanted = over(1, config);
  const auto check = [&](const std::string& run, int64_t num_train, Config other) {
    other.trainer.default_local_dir = scratch / run;
    const Ended got = over(num_train, other);
    expect_near(got, wanted, 1e-4);
    EXPECT_EQ(responses(got.trajectories), responses(wanted.trajectories)) << run;
  };
  check("1+2", 1, separate(config, 2));
  Config context = separate(config);
  context.actor.megatron.context_parallel_size = 2;
  context.ref_context_parallel_size = 2;
  check("context", 2, context);
  check("2+1", 2, separate(config));
  check("2+2", 2, separate(config, 2));
  Config stages = separate(config);
  stages.actor.megatron.pipeline_model_parallel_size = 2;
  stages.ref_pipeline_model_parallel_size = 2;
  check("stages", 2, stages);
  Config tensor = separate(config);
  tensor.actor.megatron.tensor_model_parallel_size = 2;
  tensor.ref_tensor_model_parallel_size = 2;
  check("tensor", 2, tensor);
  Config parts = separate(config, 2);
  parts.actor.strategy = "fsdp";
  check("parts", 2, parts);
}

// Refills, rows that come again and greedy baselines are the business of the ranks that generate.
TEST(SeparateRollout, TheRulesOfSamplingHoldThere) {
  const ScratchDir scratch("separate-rules");
  testing::write_tiny_model(scratch);
  Config config = config_of(scratch, "one");
  config.algorithm.adv_estimator = "remax";
  config.algorithm.filter_groups.enable = true;
  config.rollout.train.n = 2;
  const Ended wanted = over(1, config);
  double refills = 0.0;
  for (const auto& [step, metrics] : wanted.logged) {
    refills += metrics.at("training/filter_groups/num_gen_batches") - 1.0;
  }
  EXPECT_GT(refills, 0.0);
  config.trainer.default_local_dir = scratch / "two";
  expect_near(over(1, separate(config)), wanted, 0.0);
  config.trainer.default_local_dir = scratch / "ahead";
  EXPECT_EQ(over(2, one_step_off(config, 2)).summary.last_step, 4);
}

TEST(SeparateRollout, TheDataEndsForBothSides) {
  const ScratchDir scratch("separate-end");
  testing::write_tiny_model(scratch);
  for (const bool ahead : {false, true}) {
    Config config = config_of(scratch, ahead ? "ahead" : "sync");
    config = ahead ? one_step_off(config) : separate(config);
    const Ended ended = over(1, config, [](const Groups&, FakeHost& host) { host.end_after = 9; });
    EXPECT_TRUE(ended.summary.stopped_early);
    EXPECT_EQ(ended.summary.last_step, 2);
    EXPECT_TRUE(std::filesystem::exists(config.trainer.default_local_dir + "/global_step_2/state"));
  }
}

TEST(SeparateRollout, AScorerThatFailsIsTheReasonAndTheStepsBeforeAreKept) {
  const ScratchDir scratch("separate-refused");
  testing::write_tiny_model(scratch);
  Config config = one_step_off(config_of(scratch, "run"));
  config.trainer.test_freq = -1;
  config.trainer.save_freq = 1;  // the batch ahead of step 2 is the one that fails
  std::string reason;
  const auto body = [&](Groups& groups) {
    int64_t scored = 0;
    FakeHost host(tiny_prompts(config.num_train_rows), [&](const Trajectory& trajectory) {
      Score score = thirds(trajectory);
      score.failed = ++scored > 2 * 16;  // from the third step on
      score.reason = "no scorer";
      return score;
    });
    try {
      train(config, host, nullptr, &groups);
    } catch (const std::exception& error) {
      if (!only_generates(groups)) reason = error.what();
      throw;
    }
  };
  EXPECT_ANY_THROW(testing::run_mesh(2, mesh_shape(config), body));
  EXPECT_NE(reason.find("the last reason: no scorer"), std::string::npos) << reason;
  EXPECT_TRUE(std::filesystem::exists(config.trainer.default_local_dir + "/global_step_2/state"));
  // A resumed run draws it again.
  const Ended again = over(1, config);
  EXPECT_EQ(again.summary.first_step, 2);
  EXPECT_EQ(again.summary.last_step, 4);
}

TEST(SeparateRollout, TheWeightsAreSentOnceAStep) {
  const ScratchDir scratch("separate-bytes");
  testing::write_tiny_model(scratch);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Config config = separate(config_of(scratch, dtype == at::kFloat ? "fp32" : "bf16"));
    config.rollout.dtype = dtype == at::kFloat ? "float32" : "bfloat16";
    const Ended got = over(1, config);
    const auto model =
        models::random_model(testing::tiny_config_json(), 1, {{.dtype = dtype}, false});
    double numbers = 0.0, names = 0.0;
    std::set<bool> types;
    for (const Param& param : model->params().params()) {
      types.insert(param.is_form);
      names += 8.0 + static_cast<double>(param.name.size());
      numbers += (param.is_form ? 4.0 : 2.0) * static_cast<double>(param.master.numel());
    }
    EXPECT_EQ(types, std::set<bool>{dtype == at::kFloat});
    const double order = 32.0;                 // with its length
    const double announced = 8.0 + 1.0 + 8.0;  // likewise, of a message and of the last
    const auto messages = static_cast<double>(types.size() + 1);
    EXPECT_EQ(got.logged.at(1).at("comm/hand_over/broadcast_bytes"),
              order + messages * announced + names + numbers);
  }
}

TEST(SeparateRollout, OneStepOffPolicyIsSoByRule) {
  const ScratchDir scratch("separate-async");
  testing::write_tiny_model(scratch);
  Config config = config_of(scratch, "sync");
  config.trainer.total_training_steps = 1;
  const Ended one = over(1, config);
  Config ahead = one_step_off(config);
  ahead.trainer.total_training_steps = 6;
  for (const char* run : {"first", "second"}) {
    ahead.trainer.default_local_dir = scratch / run;
    const Ended ended = over(1, ahead);
    EXPECT_EQ(ended.summary.last_step, 6);
    for (const char* name : {"actor/pg_loss", "actor/grad_norm", "critic/score/mean"}) {
      EXPECT_EQ(ended.logged.at(1).at(name), one.logged.at(1).at(name)) << name;
    }
    for (int64_t step = 1; step <= 6; ++step) {
      const Metrics& metrics = ended.logged.at(step);
      for (const char* kind : {"/mean", "/max", "/min"}) {
        const auto of = [&](const std::string& name) { return metrics.at(name + kind); };
        const double age = step == 1 ? 0.0 : 1.0;
        EXPECT_EQ(of("training/off_policy/trajectory_spans"), 1.0);
        EXPECT_EQ(of("training/off_policy/trajectory_staleness"), age) << step;
        EXPECT_EQ(of("training/off_policy/trajectory_staleness_worst"), age) << step;
        EXPECT_EQ(of("rollout/weight_version"), static_cast<double>(step - 1) - age) << step;
      }
    }
    EXPECT_TRUE(std::any_of(ended.said.begin(), ended.said.end(), [](const std::string& line) {
      return line.find("one step old") != std::string::npos;
    }));
  }
  expect_same_weights(scratch / "first/global_step_6", scratch / "second/global_step_6");

  // The second batch comes from the weights before the first update.
  ahead.trainer.total_training_steps = 2;
  ahead.trainer.default_local_dir = scratch / "two";
  const Ended two = over(1, ahead);
  config.actor.optim.lr = 0.0;
  config.trainer.total_training_steps = 2;
  config.trainer.default_local_dir = scratch / "still";
  EXPECT_EQ(responses(two.trajectories), responses(over(1, config).trajectories));
}

TEST(SeparateRollout, AKilledRunGoesOnWithTheBatchThatWasOnItsWay) {
  const ScratchDir scratch("separate-resume");
  testing::write_tiny_model(scratch);
  Config config = one_step_off(config_of(scratch, "straight"), 2);
  config.rollout.over_sample_rate = 0.34;
  config.partial_rollout = true;
  config.rollout.max_num_seqs = 12;
  config.rollout.response_length = 24;
  config.trainer.save_freq = 2;
  config.trainer.total_training_steps = 6;
  const Ended straight = over(2, config);
  double resumed = 0.0;
  for (const auto& [step, metrics] : straight.logged) {
    if (step > 0) resumed += metrics.at("rollout/resumed_responses");
  }
  EXPECT_GT(resumed, 0.0);

  Config killed = config;
  killed.trainer.default_local_dir = scratch / "killed";
  killed.trainer.resume_mode = "resume_path";
  killed.trainer.resume_from_path = scratch / "straight/global_step_4";
  const Ended rest = over(2, killed);
  EXPECT_EQ(rest.summary.first_step, 4);
  EXPECT_EQ(responses(rest.trajectories), responses(straight.trajectories));
  expect_same_weights(scratch / "killed/global_step_6", scratch / "straight/global_step_6");

  // Asked to stop, by a rank that only generates too.
  for (const bool by_rollout : {false, true}) {
    Config stopped = config;
    stopped.trainer.default_local_dir = scratch / (by_rollout ? "rollout" : "train");
    const Ended first = over(2, stopped, [&](const Groups& groups, FakeHost& host) {
      if (!by_rollout) host.stop_after = 3;
      if (by_rollout && only_generates(groups)) host.ask_to_stop();
    });
    EXPECT_TRUE(first.summary.stopped_early);
    EXPECT_EQ(first.summary.last_step, by_rollout ? 1 : 3);
    EXPECT_EQ(over(2, stopped).summary.last_step, 6);
    expect_same_weights(stopped.trainer.default_local_dir + "/global_step_6",
                        scratch / "straight/global_step_6");
  }

  // A run that generates with the weights of now has no use for that batch.
  Config alone = config;
  alone.trainer_v1.trainer_mode = "sync";
  alone.hybrid_engine = true;
  alone.rollout.nnodes = 0;
  alone.trainer.default_local_dir = scratch / "alone";
  alone.trainer.resume_mode = "resume_path";
  alone.trainer.resume_from_path = scratch / "straight/global_step_4";
  EXPECT_EQ(over(1, alone).logged.at(5).at("training/off_policy/trajectory_staleness/max"), 0.0);
}

TEST(SeparateRollout, WhatFailsOnOneSideEndsTheOther) {
  const ScratchDir scratch("separate-fail");
  testing::write_tiny_model(scratch);
  const Config config = one_step_off(config_of(scratch, "run"));
  std::mutex mutex;
  std::map<int64_t, std::string> reasons;  // by side
  const auto run = [&](bool rollout_fails) {
    reasons.clear();
    const auto body = [&](Groups& groups) {
      FakeHost host(tiny_prompts(config.num_train_rows), thirds);
      int64_t asked = 0;
      const auto factory = [&](models::CausalLM&) -> std::unique_ptr<rollout::Generator> {
        if (++asked == 1 && rollout_fails) throw std::runtime_error("no generator");
        return nullptr;
      };
      try {
        const bool fails = only_generates(groups) && rollout_fails;
        Config mine = config;
        if (!rollout_fails && !only_generates(groups)) mine.trainer.resume_mode = "nowhere";
        train(mine, host, fails ? GeneratorFactory(factory) : nullptr, &groups);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        reasons[only_generates(groups) ? 1 : 0] = error.what();
        throw;
      }
    };
    EXPECT_ANY_THROW(testing::run_mesh(2, mesh_shape(config), body));
  };
  run(/*rollout_fails=*/true);
  EXPECT_EQ(reasons[1], "no generator");
  EXPECT_NE(reasons[0].find("in group hand_over: rank 0 waited for rank 1 in vain"),
            std::string::npos)
      << reasons[0];
  run(/*rollout_fails=*/false);
  EXPECT_NE(reasons[0].find("trainer.resume_mode"), std::string::npos);
  EXPECT_NE(reasons[1].find("in group hand_over: rank 1 waited for rank 0 in vain"),
            std::string::npos)
      << reasons[1];
}

TEST(SeparateRollout, KeysThatDoNotGoTogetherAreRefused) {
  const auto refusal = [](const std::function<void(Config&)>& change) {
    Config config = testing::tiny_config("", "");
    change(config);
    try {
      std::vector<std::string> notes;
      check_trainer_mode(config, notes);
      check_parallel(config, Groups());
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto expect = [&](const std::function<void(Config&)>& change, const std::string& text) {
    EXPECT_NE(refusal(change).find(text), std::string::npos) << refusal(change);
  };
  EXPECT_EQ(refusal([](Config&) {}), "");
  expect([](Config& c) { c.trainer_v1.trainer_mode = "colocate_async"; },
         "trainer.v1.trainer_mode: wanted sync or separate_async, got colocate_async");
  expect([](Config& c) { c.rollout.nnodes = 1; },
         "actor_rollout_ref.rollout.nnodes: wanted 0 with actor_rollout_ref.hybrid_engine=true");
  expect([](Config& c) { c.hybrid_engine = false; },
         "rollout.nnodes: wanted >= 1 with actor_rollout_ref.hybrid_engine=false, got 0");
  expect([](Config& c) { c = one_step_off(c, 0); },
         "rollout.nnodes: wanted >= 1 with trainer.v1.trainer_mode=separate_async, got 0");
  expect(
      [](Config& c) {
        c = one_step_off(c);
        c.trainer_v1.separate_async.parameter_sync_step = 4;
      },
      "parameter_sync_step: wanted data.train_batch_size / "
      "actor_rollout_ref.actor.ppo_mini_batch_size (1), got 4");
  expect([](Config& c) { c = separate(c, 3); },
         "rollout.nnodes x n_gpus_per_node: wanted fewer than the processes of the run (1), got 3");
}

// A prompt whose responses would come from too many versions of the weights starts no further.
TEST(SeparateRollout, WhatIsTooOldIsDropped) {
  const ScratchDir scratch("separate-old");
  testing::write_tiny_model(scratch);
  Config config = config_of(scratch, "one");
  config.rollout.over_sample_rate = 0.34;
  config.partial_rollout = true;
  config.rollout.max_num_seqs = 12;
  config.rollout.response_length = 24;
  config.max_off_policy_threshold = 1;
  const Ended ended = over(1, config);
  double evicted = 0.0;
  for (const auto& [step, metrics] : ended.logged) {
    evicted += metrics.at("training/off_policy/evicted_samples");
    EXPECT_EQ(metrics.at("training/off_policy/trajectory_spans/max"), 1.0);
  }
  EXPECT_GT(evicted, 0.0);
}

}  // namespace banyan::train
