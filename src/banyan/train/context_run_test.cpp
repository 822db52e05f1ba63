// Whole runs whose passes are computed by several ranks together: rollout, scores, values, updates
// and checkpoints are those of one process.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "banyan/testing/fake_host.h"
#include "banyan/testing/five_groups.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/trainer.h"

namespace banyan::train {
namespace {

using testing::FakeHost;
using testing::relative;
using testing::ScratchDir;
using testing::tiny_prompts;

Score thirds(const Trajectory& trajectory) {
  return testing::share_of_tokens(trajectory, [](int32_t token) { return token % 3 == 0; });
}

struct Ended {
  std::map<int64_t, Metrics> logged;
  std::vector<Trajectory> trajectories;
};

std::vector<Ended> run_on(int64_t size, const Config& config) {
  std::vector<Ended> ended(size);
  testing::run_mesh(size, mesh_shape(config), [&](parallel::Groups& groups) {
    FakeHost host(tiny_prompts(config.num_train_rows), thirds);
    train(config, host, nullptr, &groups);
    if (parallel::only_generates(groups)) return;
    ended[groups.world.rank()] = {host.logged, host.last_trajectories};
  });
  return ended;
}

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

// Figures that the layout of a run changes.
bool is_layout(const std::string& name) {
  return name.starts_with("timing") || name.starts_with("perf/") ||
         name.starts_with("actor/perf/") || name.starts_with("global_seqlen/") ||
         name.starts_with("trie/") || name.starts_with("comm/") ||
         name == "rollout/computed_prompt_tokens";
}

void expect_same_run(const Ended& got, const Ended& wanted, const std::string& what) {
  ASSERT_EQ(got.logged.size(), wanted.logged.size());
  for (const auto& [step, metrics] : wanted.logged) {
    for (const auto& [name, value] : metrics) {
      if (is_layout(name)) continue;
      EXPECT_NEAR(got.logged.at(step).at(name), value, 1e-4 * std::max(1.0, std::abs(value)))
          << what << " " << name << " step " << step;
    }
  }
  ASSERT_EQ(got.trajectories.size(), wanted.trajectories.size());
  for (size_t i = 0; i < got.trajectories.size(); ++i) {
    EXPECT_EQ(got.trajectories[i].response, wanted.trajectories[i].response) << what;
  }
}

}  // namespace

TEST(ContextRun, EqualsThatOfOneProcessAndResumesInOne) {
  const ScratchDir scratch("context-run");
  testing::write_tiny_model(scratch);
  FakeHost host(tiny_prompts(), thirds);
  train(config_of(scratch, "one"), host);
  const Ended one = {host.logged, host.last_trajectories};
  const auto wanted = testing::masters(scratch / "one/global_step_3");
  for (const std::string form : {"ranges", "heads"}) {
    Config config = config_of(scratch, form);
    form == "ranges" ? set_ranges(config, 2) : set_heads(config, 2);
    for (const Ended& rank : run_on(2, config)) {
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
  EXPECT_EQ(run_on(1, config)[0].logged.count(4), 1U);
}

// Four processes: two groups of two, whole weights or in parts.
TEST(ContextRun, BesideDataParallelRanksAndWithWeightsInParts) {
  const ScratchDir scratch("context-parts");
  testing::write_tiny_model(scratch);
  FakeHost host(tiny_prompts(), thirds);
  train(config_of(scratch, "one"), host);
  const Ended one = {host.logged, host.last_trajectories};
  for (const std::string form : {"ranges", "heads"}) {
    for (const bool in_parts : {false, true}) {
      const std::string run = form + (in_parts ? "-parts" : "-whole");
      Config config = config_of(scratch, run);
      form == "ranges" ? set_ranges(config, 2) : set_heads(config, 2);
      if (in_parts) config.actor.strategy = "fsdp";
      expect_same_run(run_on(4, config)[0], one, run);
    }
  }
}

// Two ranks that train together, and one that generates for them.
TEST(ContextRun, BesideRanksThatOnlyGenerate) {
  const ScratchDir scratch("context-separate");
  testing::write_tiny_model(scratch);
  FakeHost host(tiny_prompts(), thirds);
  train(config_of(scratch, "one"), host);
  const Ended one = {host.logged, host.last_trajectories};
  for (const std::string form : {"ranges", "heads"}) {
    Config config = config_of(scratch, form);
    form == "ranges" ? set_ranges(config, 2) : set_heads(config, 2);
    config.hybrid_engine = false;
    config.rollout.nnodes = 1;
    std::vector<Ended> ranks = run_on(3, config);
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
    for (const Ended& rank : run_on(2, config)) {
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
