// Whole runs whose passes are computed by several ranks together: rollout, scores, values, updates
// and checkpoints are those of one process.
#include <gtest/gtest.h>

#include "banyan/testing/layout_run.h"

namespace banyan::train {
namespace {

using testing::Ended;
using testing::expect_same_run;
using testing::FakeHost;
using testing::relative;
using testing::run_layout;
using testing::ScratchDir;
using testing::thirds;
using testing::tiny_prompts;

// Three steps with a reference and a critic, in blocks that cut the trunks.
Config config_of(const ScratchDir& scratch, const std::string& run) {
  Config config = testing::tiny_config(scratch / "model", scratch / run);
  config.rollout.dtype = "float32";
  config.actor.use_kl_loss = true;
  config.algorithm.adv_estimator = "gae";
  config.actor.ppo_mini_batch_size = 2;
  config.actor.ppo_max_token_len_per_gpu = 40;
  config.actor.optim.lr = config.critic.optim.lr = 1e-3;
  config.trainer.total_training_steps = 3;
  return config;
}

void set_ranges(Config& config, int64_t size) {
  config.actor.megatron.context_parallel_size = size;
  config.critic.megatron.context_parallel_size = size;
  config.ref_context_parallel_size = size;
}

void set_heads(Config& config, int64_t size) {
  config.actor.ulysses_sequence_parallel_size = size;
  config.critic.ulysses_sequence_parallel_size = size;
  config.ref_ulysses_sequence_parallel_size = size;
}

}  // namespace

TEST(ContextRun, EqualsThatOfOneProcessAndResumesInOne) {
  const ScratchDir scratch("context-run");
  testing::write_tiny_model(scratch);
  const Ended one = run_layout(1, config_of(scratch, "one"))[0];
  const auto wanted = testing::masters(scratch / "one/global_step_3");
  for (const std::string form : {"ranges", "heads"}) {
    Config config = config_of(scratch, form);
    form == "ranges" ? set_ranges(config, 2) : set_heads(config, 2);
    for (const Ended& rank : run_layout(2, config)) {
      expect_same_run(rank, one, form);
      EXPECT_GT(rank.logged.at(1).at("comm/cp/all_to_all_bytes"), 0.0);
    }
    const auto saved = testing::masters(scratch / (form + "/global_step_3"));
    for (const auto& [name, tensor] : wanted) {
      EXPECT_LE(relative(saved.at(name), tensor), 1e-4) << form << " " << name;
    }
  }
  // One more step in one process.
  Config config = config_of(scratch, "heads");
  config.trainer.total_training_steps = 4;
  EXPECT_EQ(run_layout(1, config)[0].logged.count(4), 1U);
}

// Four processes: two groups of two, whole weights or in parts.
TEST(ContextRun, BesideDataParallelRanksAndWithWeightsInParts) {
  const ScratchDir scratch("context-parts");
  testing::write_tiny_model(scratch);
  const Ended one = run_layout(1, config_of(scratch, "one"))[0];
  for (const std::string form : {"ranges", "heads"}) {
    for (const bool in_parts : {false, true}) {
      const std::string run = form + (in_parts ? "-parts" : "-whole");
      Config config = config_of(scratch, run);
      form == "ranges" ? set_ranges(config, 2) : set_heads(config, 2);
      if (in_parts) config.actor.strategy = "fsdp";
      expect_same_run(run_layout(4, config)[0], one, run);
    }
  }
}

// Two ranks that train together, and one that generates for them.
TEST(ContextRun, BesideRanksThatOnlyGenerate) {
  const ScratchDir scratch("context-separate");
  testing::write_tiny_model(scratch);
  const Ended one = run_layout(1, config_of(scratch, "one"))[0];
  for (const std::string form : {"ranges", "heads"}) {
    Config config = config_of(scratch, form);
    form == "ranges" ? set_ranges(config, 2) : set_heads(config, 2);
    config.hybrid_engine = false;
    config.rollout.nnodes = 1;
    std::vector<Ended> ranks = run_layout(3, config);
    expect_same_run(ranks[0], one, form + ", separate rollout");
  }
}

TEST(ContextRun, SharingIsVerifiedOverAllRanks) {
  const ScratchDir scratch("context-verify");
  testing::write_tiny_model(scratch);
  Config config = config_of(scratch, "run");
  config.sharing.verify = "first";
  config.sharing.observe = "layer";
  config.trainer.total_training_steps = 1;
  set_ranges(config, 2);
  testing::run_mesh(2, mesh_shape(config), [&](parallel::Groups& groups) {
    FakeHost host(tiny_prompts(), thirds);
    train(config, host, nullptr, &groups);
    const auto says = [&](const std::string& text) {
      return std::count_if(host.said.begin(), host.said.end(), [&](const std::string& line) {
        return line.find(text) != std::string::npos;
      });
    };
    EXPECT_EQ(says("sharing.verify: gradients with and without sharing differ by"), 1);
    EXPECT_EQ(says("go on without sharing"), 0);
    EXPECT_GT(says("matches_expected=True"), 0);
    EXPECT_EQ(says("matches_expected=False"), 0);
  });
}

// Log-probabilities of the passes have the bits of the rollout's, whoever computes them.
TEST(ContextRun, InBf16TrainingAndRolloutHaveTheSameBits) {
  const ScratchDir scratch("context-bits");
  testing::write_tiny_model(scratch);
  for (const std::string form : {"ranges", "heads"}) {
    Config config = config_of(scratch, form);
    config.rollout.dtype = "bfloat16";
    config.trainer.total_training_steps = 2;
    form == "ranges" ? set_ranges(config, 2) : set_heads(config, 2);
    for (const Ended& rank : run_layout(2, config)) {
      for (const auto& [step, metrics] : rank.logged) {
        EXPECT_EQ(metrics.at("training/rollout_probs_diff_valid"), 1.0) << form;
        EXPECT_EQ(metrics.at("training/rollout_probs_diff_max"), 0.0) << form << " step " << step;
      }
    }
  }
}

TEST(ContextRun, HeadsThatCannotBeDealtOutAreRefusedBeforeAModelLoads) {
  const ScratchDir scratch("context-heads");
  testing::write_tiny_model(scratch);
  Config config = config_of(scratch, "run");
  set_heads(config, 3);
  testing::run_mesh(3, mesh_shape(config), [&](parallel::Groups& groups) {
    FakeHost host(tiny_prompts(), thirds);
    try {
      train(config, host, nullptr, &groups);
      ADD_FAILURE() << "three ranks share four heads";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what())
                    .find("[config] actor_rollout_ref.actor.ulysses_sequence_parallel_size: wanted "
                          "a divisor of the 4 query heads"),
                std::string::npos)
          << error.what();
    }
  });
}

}  // namespace banyan::train
