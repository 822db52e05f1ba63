// Whole runs of the trainer with experts dealt out over ranks, and their checkpoints under any
// layout.
#include <gtest/gtest.h>

#include "banyan/testing/layout_run.h"

namespace banyan::train {
namespace {

using banyan::testing::relative;
using banyan::testing::run_layout;
using banyan::testing::ScratchDir;

struct Sizes {
  int64_t processes = 1;
  int64_t tensor = 1;
  int64_t experts = 1;
  int64_t context = 1;
  int64_t stages = 1;
  std::optional<int64_t> parts = {};  // of an expert

  std::string name() const {
    std::string text = "dealt";
    for (const int64_t size :
         {processes, tensor, experts, context, stages, parts.value_or(tensor)}) {
      text += "_" + std::to_string(size);
    }
    return text;
  }
};

void set_sizes(const Sizes& sizes, Config& config) {
  for (MegatronConfig* megatron : {&config.actor.megatron, &config.critic.megatron}) {
    megatron->tensor_model_parallel_size = sizes.tensor;
    megatron->sequence_parallel = true;
    megatron->expert_model_parallel_size = sizes.experts;
    megatron->context_parallel_size = sizes.context;
    megatron->pipeline_model_parallel_size = sizes.stages;
    megatron->expert_tensor_parallel_size = sizes.parts;
  }
  config.ref_tensor_model_parallel_size = sizes.tensor;
  config.ref_expert_model_parallel_size = sizes.experts;
  config.ref_context_parallel_size = sizes.context;
  config.ref_pipeline_model_parallel_size = sizes.stages;
  config.ref_expert_tensor_parallel_size = sizes.parts;
}

Config config_of(const ScratchDir& scratch) {
  Config config = testing::layout_config(scratch, testing::tiny_moe_config_json());
  config.actor.router.moe_aux_loss_coeff = 0.01;
  return config;
}

}  // namespace

// Two steps; then one more from the checkpoint, under other layouts, and back.
TEST(ExpertRun, EqualsThatOfOneProcessAndResumesUnderAnyLayout) {
  const ScratchDir scratch("expert-run");
  const Config config = config_of(scratch);
  const testing::Ended one = run_layout(1, config)[0];
  const auto wanted = testing::masters(scratch / "one/global_step_2");
  for (const Sizes& sizes : {Sizes{.processes = 2, .experts = 2},
                             Sizes{.processes = 3, .experts = 3, .context = 3},
                             Sizes{.processes = 4, .experts = 2, .stages = 2},
                             Sizes{.processes = 2, .tensor = 2, .experts = 2, .parts = 1},
                             Sizes{.processes = 4, .experts = 2, .parts = 2},
                             Sizes{.processes = 4, .tensor = 2, .experts = 2}}) {
    Config dealt = config;
    dealt.trainer.default_local_dir = scratch / sizes.name();
    set_sizes(sizes, dealt);
    for (const testing::Ended& rank : run_layout(sizes.processes, dealt)) {
      testing::expect_same_run(rank, one, sizes.name());
    }
    const auto saved = testing::masters(dealt.trainer.default_local_dir + "/global_step_2");
    ASSERT_EQ(saved.size(), wanted.size());
    for (const auto& [name, tensor] : wanted) {
      EXPECT_LE(relative(saved.at(name), tensor), 1e-4) << name;
    }
  }

  // What was loaded under another layout, masters and moments, is saved with the same bits.
  const Sizes last{.processes = 4, .tensor = 2, .experts = 2};
  const std::string saved = scratch / (last.name() + "/global_step_2");
  std::string from = saved;
  for (const Sizes& sizes : {Sizes{},
                             Sizes{.processes = 4, .experts = 2},
                             Sizes{.processes = 2, .tensor = 2},
                             Sizes{.processes = 4, .experts = 2, .stages = 2},
                             Sizes{.processes = 2, .tensor = 2, .parts = 1},
                             Sizes{.processes = 4, .experts = 2, .parts = 2},
                             Sizes{.processes = 3, .experts = 3}}) {
    Config other = config;
    set_sizes(sizes, other);
    from = testing::moved(sizes.processes, other, from, scratch / ("again_" + sizes.name()));
    testing::expect_same_checkpoint(from, saved);
  }

  // A run goes on from it: one more step that moves no weight.
  Config other = config;
  set_sizes({.processes = 4, .experts = 2, .stages = 2}, other);
  const std::string next = testing::saved_again(4, other, saved, 3, scratch);
  for (const std::string folder : {"", "/critic"}) {
    const auto loaded = testing::masters(next + folder);
    for (const auto& [name, master] : testing::masters(saved + folder)) {
      EXPECT_TRUE(loaded.at(name).equal(master)) << name;
    }
  }
}

TEST(ExpertRun, SizesThatDoNotGoTogetherAreRefusedByName) {
  const auto refusal = [](const auto& change) {
    Config config = testing::tiny_config("", "");
    config.actor.megatron.expert_model_parallel_size = 2;
    config.ref_expert_model_parallel_size = 2;
    change(config);
    try {
      check_parallel(config);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal([](Config&) {}), "");
  EXPECT_NE(refusal([](Config& config) { config.ref_expert_model_parallel_size = 1; })
                .find("actor_rollout_ref.ref.megatron.expert_model_parallel_size: wanted the "
                      "actor's (2), got 1"),
            std::string::npos);
  EXPECT_NE(refusal([](Config& config) { config.actor.megatron.expert_tensor_parallel_size = 2; })
                .find("actor_rollout_ref.ref.megatron.expert_tensor_parallel_size: wanted the "
                      "actor's (2), got 1"),
            std::string::npos);
  EXPECT_NE(refusal([](Config& config) {
              config.actor.megatron.expert_model_parallel_size = 3;
              config.ref_expert_model_parallel_size = 3;
              config.actor.megatron.context_parallel_size = 2;
              config.ref_context_parallel_size = 2;
              config.actor.megatron.pipeline_model_parallel_size = 2;
              config.ref_pipeline_model_parallel_size = 2;
            })
                .find("expert_model_parallel_size x expert_tensor_parallel_size: wanted a divisor "
                      "or a multiple of tensor x context parallel size (2) with "
                      "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2, got 3"),
            std::string::npos);
  EXPECT_NE(refusal([](Config& config) {
              config.actor.megatron.expert_model_parallel_size = 1;
              config.ref_expert_model_parallel_size = 1;
              config.actor.megatron.expert_tensor_parallel_size = 2;
              config.ref_expert_tensor_parallel_size = 2;
              config.actor.strategy = "fsdp";
            })
                .find("wanted megatron or null with "
                      "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=2, got fsdp"),
            std::string::npos);
  EXPECT_NE(refusal([](Config& config) {
              config.actor.strategy = "fsdp";
            }).find("weights are cut in one way"),
            std::string::npos);

  const ScratchDir scratch("expert-refusal");
  Config dense = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "run");
  set_sizes({.experts = 2}, dense);
  try {
    run_layout(2, dense);
    FAIL() << "a dense model has no experts";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("expert_model_parallel_size: wanted 1 for a model"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace banyan::train
