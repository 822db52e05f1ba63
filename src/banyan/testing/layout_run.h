// Whole runs of the trainer over ranks that are threads, and how they compare with one process.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "banyan/checkpoint/checkpoint.h"
#include "banyan/testing/fake_host.h"
#include "banyan/testing/five_groups.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/trainer.h"

namespace banyan::testing {

// A reward that varies with the response.
inline Score thirds(const Trajectory& trajectory) {
  return share_of_tokens(trajectory, [](int32_t token) { return token % 3 == 0; });
}

struct Ended {
  std::map<int64_t, Metrics> logged;
  std::vector<Trajectory> trajectories;
};

// [ranks]; nothing of those that only generate. `size` processes under the keys of `config`; one is
// a run without groups.
inline std::vector<Ended> run_layout(int64_t size, const Config& config) {
  std::vector<Ended> ended(size);
  const auto run = [&](parallel::Groups* groups, Ended& into) {
    FakeHost host(tiny_prompts(config.num_train_rows), thirds);
    train::train(config, host, nullptr, groups);
    if (groups != nullptr && parallel::only_generates(*groups)) return;
    into = {host.logged, host.last_trajectories};
  };
  if (size == 1) {
    run(nullptr, ended[0]);
    return ended;
  }
  run_mesh(size, train::mesh_shape(config), [&](parallel::Groups& groups) {
    run(&groups, ended[groups.world.rank()]);
  });
  return ended;
}

// Metrics that say how the work was laid out, or how long it took.
inline bool is_layout(const std::string& name) {
  const auto starts = [&](const char* prefix) { return name.starts_with(prefix); };
  return starts("timing") || starts("perf/") || starts("actor/perf/") || starts("global_seqlen/") ||
         starts("trie/") || starts("comm/") || name == "rollout/computed_prompt_tokens";
}

// Metrics as near as fp32 allows, and the same responses.
inline void expect_same_run(const Ended& rank,
                            const Ended& one,
                            const std::string& what,
                            double bound = 1e-4) {
  ASSERT_EQ(rank.logged.size(), one.logged.size()) << what;
  for (const auto& [step, metrics] : one.logged) {
    for (const auto& [name, value] : metrics) {
      if (is_layout(name)) continue;
      EXPECT_NEAR(rank.logged.at(step).at(name), value, bound * std::max(1.0, std::abs(value)))
          << what << " " << name << " step " << step;
    }
  }
  ASSERT_EQ(rank.trajectories.size(), one.trajectories.size()) << what;
  for (size_t i = 0; i < rank.trajectories.size(); ++i) {
    EXPECT_EQ(rank.trajectories[i].response, one.trajectories[i].response) << what;
  }
}

// Two steps in fp32 with a reference and a critic, of a random model of `architecture`, into "one".
inline Config layout_config(const ScratchDir& scratch, const std::string& architecture) {
  Config config = tiny_config(write_tiny_model(scratch, 1, architecture), scratch / "one");
  config.rollout.dtype = "float32";
  config.actor.use_kl_loss = true;
  config.algorithm.adv_estimator = "gae";
  config.actor.ppo_mini_batch_size = 2;
  config.actor.optim.lr = config.critic.optim.lr = 1e-3;
  config.trainer.total_training_steps = 2;
  config.trainer.test_freq = 2;
  return config;
}

// One more step from the checkpoint `from` that moves no weight, over `size` processes under the
// keys of `config`: the path of what it saved.
inline std::string saved_again(
    int64_t size, Config config, const std::string& from, int64_t step, const ScratchDir& scratch) {
  config.actor.optim.lr = config.critic.optim.lr = 0.0;
  config.trainer.total_training_steps = step;
  config.trainer.resume_mode = "resume_path";
  config.trainer.resume_from_path = from;
  config.trainer.default_local_dir = scratch / ("again" + std::to_string(step));
  run_layout(size, config);
  return config.trainer.default_local_dir + "/global_step_" + std::to_string(step);
}

// A checkpoint of the actor, loaded over `size` processes under the keys of `config` and saved
// again under `to`, with its moments: the path.
inline std::string moved(int64_t size,
                         const Config& config,
                         const std::string& from,
                         const std::string& to) {
  int64_t step = 0;
  run_mesh(size, train::mesh_shape(config), [&](parallel::Groups& groups) {
    models::LoadOptions options{{.dtype = at::kFloat}, /*with_backward=*/true};
    train::set_cut(/*sequence_parallel=*/true, groups, options);
    train::set_stages(train::stage_split(config), groups, options);
    train::set_experts(config, groups, options);
    const auto model = models::load_model(config.model.path, options);
    const auto optimizer = train::make_optimizer(config.actor.optim, *model, groups);
    const checkpoint::TrainerState state = checkpoint::load(from, *model, *optimizer);
    optimizer->gather_moments();
    checkpoint::save(to, *model, *optimizer, state, from, 0, nullptr, &groups);
    if (groups.world.is_first()) step = state.global_step;
  });
  return to + "/global_step_" + std::to_string(step);
}

// Masters and moments have equal bits, and the moments are not zero.
inline void expect_same_checkpoint(const std::string& path, const std::string& wanted) {
  for (const std::string file : {"/state/master.safetensors", "/state/moments.safetensors"}) {
    const io::SafetensorsFile mine(path + file);
    const io::SafetensorsFile other(wanted + file);
    ASSERT_EQ(mine.entries().size(), other.entries().size()) << path;
    for (const auto& [name, entry] : other.entries()) {
      const at::Tensor tensor = other.read(name);
      EXPECT_TRUE(mine.read(name).equal(tensor)) << name << " in " << path;
      if (name.starts_with("v.")) {
        EXPECT_GT(tensor.sum().item<double>(), 0.0) << name;
      }
    }
  }
}

// What check_parallel says of the keys, and then of one process under them; "": nothing.
inline std::string parallel_refusal(const Config& config) {
  try {
    train::check_parallel(config);
    train::check_parallel(config, parallel::Groups());
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace banyan::testing
