// Whole runs of the trainer over the stages of a pipeline, and their checkpoints under any layout.
#include <gtest/gtest.h>

#include <functional>

#include "banyan/testing/layout_run.h"

namespace banyan::train {
namespace {

using banyan::testing::Ended;
using banyan::testing::expect_same_run;
using banyan::testing::relative;
using banyan::testing::run_layout;
using banyan::testing::ScratchDir;

struct Sizes {
  int64_t processes = 1;
  int64_t tensor = 1;
  int64_t stages = 1;
  std::optional<int64_t> chunks = {};
};

void set_sizes(const Sizes& sizes, Config& config) {
  for (MegatronConfig* megatron : {&config.actor.megatron, &config.critic.megatron}) {
    megatron->tensor_model_parallel_size = sizes.tensor;
    megatron->sequence_parallel = true;
    megatron->pipeline_model_parallel_size = sizes.stages;
    megatron->virtual_pipeline_model_parallel_size = sizes.chunks;
  }
  config.ref_tensor_model_parallel_size = sizes.tensor;
  config.ref_pipeline_model_parallel_size = sizes.stages;
  config.ref_virtual_pipeline_model_parallel_size = sizes.chunks;
}

std::string four_layers() {
  std::string config = testing::tiny_config_json();
  config.replace(config.find("num_hidden_layers\": 2"), 21, "num_hidden_layers\": 4");
  return config;
}

Config config_of(const ScratchDir& scratch) {
  return testing::layout_config(scratch, four_layers());
}

}  // namespace

// Two steps; then one more from the checkpoint, under other layouts, and back.
TEST(PipelineRun, EqualsThatOfOneProcessAndResumesUnderAnyLayout) {
  const ScratchDir scratch("pipeline-run");
  const Config config = config_of(scratch);
  const Ended one = run_layout(1, config)[0];
  const auto wanted = testing::masters(scratch / "one/global_step_2");

  Config staged = config;
  staged.trainer.default_local_dir = scratch / "staged";
  set_sizes({.tensor = 2, .stages = 2}, staged);
  for (const Ended& rank : run_layout(4, staged)) expect_same_run(rank, one, "staged");
  const auto saved = testing::masters(scratch / "staged/global_step_2");
  ASSERT_EQ(saved.size(), wanted.size());
  for (const auto& [name, tensor] : wanted) {
    EXPECT_LE(relative(saved.at(name), tensor), 1e-4) << name;
  }

  // Nothing to train: what was loaded under another layout is saved with the same bits.
  std::string from = scratch / "staged/global_step_2";
  int64_t step = 2;
  for (const Sizes& sizes : {Sizes{.processes = 4},
                             Sizes{.processes = 4, .tensor = 2, .stages = 2},
                             Sizes{.processes = 2, .stages = 2, .chunks = 2},
                             Sizes{},
                             Sizes{.processes = 4, .stages = 4}}) {
    Config other = config;
    set_sizes(sizes, other);
    from = testing::saved_again(sizes.processes, other, from, ++step, scratch);
    for (const std::string folder : {"", "/critic"}) {
      const auto loaded = testing::masters(from + folder);
      for (const auto& [name, master] :
           testing::masters(scratch / ("staged/global_step_2" + folder))) {
        EXPECT_TRUE(loaded.at(name).equal(master)) << name << " at step " << step;
      }
    }
  }
}

// Masters and moments, loaded under one layout and saved again under it, keep their bits.
TEST(PipelineRun, MomentsComeBackUnderAnyLayout) {
  const ScratchDir scratch("pipeline-moments");
  Config config = config_of(scratch);
  config.algorithm.adv_estimator = "grpo";
  config.trainer.total_training_steps = 1;
  config.trainer.default_local_dir = scratch / "staged";
  set_sizes({.tensor = 2, .stages = 2}, config);
  run_layout(4, config);
  const std::string path = scratch / "staged/global_step_1";
  for (const Sizes& sizes : {Sizes{.processes = 4},
                             Sizes{.processes = 2, .tensor = 2},
                             Sizes{.processes = 4, .stages = 4},
                             Sizes{.processes = 4, .tensor = 2, .stages = 2}}) {
    set_sizes(sizes, config);
    const std::string to =
        scratch / ("again" + std::to_string(sizes.tensor) + std::to_string(sizes.stages));
    testing::expect_same_checkpoint(testing::moved(sizes.processes, config, path, to), path);
  }
}

TEST(PipelineRun, KeysThatDoNotGoTogetherAreRefused) {
  const auto refusal = [](const std::function<void(Config&)>& change) {
    Config config = testing::tiny_config("", "");
    set_sizes({.stages = 2}, config);
    change(config);
    return testing::parallel_refusal(config);
  };
  const auto expect_refused = [&](const std::string& text,
                                  const std::function<void(Config&)>& change) {
    EXPECT_NE(refusal(change).find(text), std::string::npos) << refusal(change);
  };
  expect_refused(
      "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size: wanted the actor's (2), got 1",
      [](Config& config) { config.ref_pipeline_model_parallel_size = 1; });
  expect_refused(
      "critic.megatron.virtual_pipeline_model_parallel_size: wanted the actor's (1), got 2",
      [](Config& config) {
        config.algorithm.adv_estimator = "gae";
        config.critic.megatron.virtual_pipeline_model_parallel_size = 2;
      });
  expect_refused(
      "actor_rollout_ref.sharing.verify: wanted off with "
      "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
      [](Config& config) { config.sharing.verify = "first"; });
  expect_refused(
      "actor_rollout_ref.actor.strategy: wanted megatron or null with "
      "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
      [](Config& config) { config.actor.strategy = "fsdp"; });
  expect_refused(
      "account_for_loss_in_pipeline_split: wanted null or false with "
      "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_"
      "stage",
      [](Config& config) {
        config.actor.stages.account_for_loss_in_pipeline_split = true;
        config.actor.stages.num_layers_in_first_pipeline_stage = 1;
      });
  expect_refused("wanted a divisor of the number of processes (1), got 2", [](Config&) {});
}

}  // namespace banyan::train
