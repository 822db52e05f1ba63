// Whole runs with weights in parts over ranks: they are those of one process, and their checkpoints
// are loaded by any number of ranks with the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>

#include "banyan/checkpoint/checkpoint.h"
#include "banyan/checkpoint/pieces.h"
#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/io/test_support.h"
#include "banyan/testing/fake_host.h"
#include "banyan/testing/five_groups.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/trainer.h"

namespace banyan::train {
namespace {

using parallel::Groups;
using testing::FakeHost;
using testing::relative;
using testing::ScratchDir;
using testing::tiny_prompts;

Score thirds(const Trajectory& trajectory) {
  return testing::share_of_tokens(trajectory, [](int32_t token) { return token % 3 == 0; });
}

Config config_of(const ScratchDir& scratch, const std::string& run) {
  Config config = testing::tiny_config(scratch / "model", scratch / run);
  config.rollout.dtype = "float32";
  config.actor.use_kl_loss = true;
  config.actor.ppo_mini_batch_size = 2;
  config.actor.ppo_max_token_len_per_gpu = 48;
  config.trainer.total_training_steps = 5;
  config.num_train_rows = 20;
  config.trainer.test_freq = 2;
  return config;
}

using Logged = std::map<int64_t, Metrics>;

Logged alone(const Config& config) {
  FakeHost host(tiny_prompts(config.num_train_rows), thirds);
  train(config, host);
  return host.logged;
}

// What the first of `size` ranks logged; with `strategy` null their weights are whole (ZeRO-1).
Logged over(int64_t size, Config config, const char* strategy) {
  if (strategy != nullptr) config.actor.strategy = strategy;
  Logged logged;
  testing::run_mesh(size, mesh_shape(config), [&](Groups& groups) {
    FakeHost host(tiny_prompts(config.num_train_rows), thirds);
    train(config, host, nullptr, &groups);
    if (groups.world.is_first()) logged = host.logged;
  });
  return logged;
}

Logged in_parts(int64_t size, const Config& config) { return over(size, config, "fsdp"); }

void expect_near(const Logged& got, const Logged& wanted) {
  const std::set<std::string> names = {"actor/pg_loss",
                                       "actor/kl_loss",
                                       "actor/grad_norm",
                                       "critic/score/mean",
                                       "critic/vf_loss",
                                       "critic/grad_norm",
                                       "response_length/mean"};
  ASSERT_EQ(got.size(), wanted.size());
  for (const auto& [step, metrics] : wanted) {
    for (const auto& [name, value] : metrics) {
      if (!names.contains(name)) continue;
      EXPECT_NEAR(got.at(step).at(name), value, 1e-4 * std::max(1.0, std::abs(value)))
          << name << " step " << step;
    }
  }
}

// Masters and moments of the actor in a checkpoint, loaded by `size` ranks, `shard` of which hold a
// copy; 0: each has all of it.
std::map<std::string, at::Tensor> loaded(const std::string& path, int64_t size, int64_t shard) {
  std::map<std::string, at::Tensor> all;
  testing::run_mesh(size, {.shard = shard}, [&](Groups& groups) {
    const auto model =
        models::random_model(testing::tiny_config_json(), 9, {{.dtype = at::kFloat}, true});
    const auto fsdp = shard_model({.cuts_weights = shard > 0}, true, *model, groups);
    const auto optimizer = make_optimizer(testing::tiny_config("", "").actor.optim, *model, groups);
    checkpoint::load(path, *model, *optimizer);
    std::map<std::string, at::Tensor> mine;
    if (fsdp) {
      const auto keep = [&](const std::string& prefix) {
        return [&mine, prefix](const Param& param, const at::Tensor& whole) {
          mine[prefix + param.name] = whole.clone();
        };
      };
      fsdp->each(at::kFloat, keep(""));
      fsdp->each_of(optimizer->first_moments(), at::kFloat, keep("m."));
      fsdp->each_of(optimizer->second_moments(), at::kFloat, keep("v."));
    } else {
      optimizer->gather_moments();
      const std::vector<Param>& params = model->params().params();
      for (size_t i = 0; i < params.size(); ++i) {
        mine[params[i].name] = params[i].master.clone();
        mine["m." + params[i].name] = optimizer->first_moments()[i].clone();
        mine["v." + params[i].name] = optimizer->second_moments()[i].clone();
      }
    }
    if (groups.world.is_first()) all = std::move(mine);
  });
  return all;
}

void expect_same(const std::map<std::string, at::Tensor>& a,
                 const std::map<std::string, at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) EXPECT_TRUE(tensor.equal(b.at(name))) << name;
}

}  // namespace

TEST(FsdpRun, EqualsThatOfOneProcess) {
  const ScratchDir scratch("fsdp-run");
  testing::write_tiny_model(scratch);
  const Logged wanted = alone(config_of(scratch, "one"));
  Config config = config_of(scratch, "two");
  config.actor.fsdp.forward_prefetch = true;
  expect_near(in_parts(2, config), wanted);
  config = config_of(scratch, "four");
  config.actor.fsdp.fsdp_size = 2;
  config.actor.fsdp.reshard_after_forward = false;
  expect_near(in_parts(4, config), wanted);
  const auto one = loaded(scratch / "one/global_step_5", 1, 0);
  for (const char* run : {"two", "four"}) {
    for (const auto& [name, tensor] :
         loaded(scratch / (std::string(run) + "/global_step_5"), 1, 0)) {
      EXPECT_LE(relative(tensor, one.at(name)), 1e-3) << name;
    }
  }
}

// Rollout, scores, sums, clipping, optimizer: whole weights or parts, the run is the same.
TEST(FsdpRun, HasTheBitsOfZero1) {
  const ScratchDir scratch("fsdp-zero1");
  testing::write_tiny_model(scratch);
  for (const char* dtype : {"bfloat16", "float32"}) {
    Config config = config_of(scratch, std::string("whole-") + dtype);
    config.rollout.dtype = dtype;
    config.trainer.total_training_steps = 3;
    over(3, config, nullptr);
    config.trainer.default_local_dir = scratch / (std::string("parts-") + dtype);
    config.fsdp_reduce_each_block = false;  // more than one block
    in_parts(3, config);
    expect_same(loaded(scratch / (std::string("parts-") + dtype + "/global_step_3"), 1, 0),
                loaded(scratch / (std::string("whole-") + dtype + "/global_step_3"), 1, 0));
  }
}

TEST(FsdpRun, ACriticIsCutLikeTheActor) {
  const ScratchDir scratch("fsdp-critic");
  testing::write_tiny_model(scratch);
  Config config = config_of(scratch, "one");
  config.algorithm.adv_estimator = "gae";
  config.trainer.total_training_steps = 2;
  const Logged wanted = alone(config);
  config.trainer.default_local_dir = scratch / "two";
  expect_near(in_parts(2, config), wanted);
  EXPECT_TRUE(
      std::filesystem::exists(scratch / "two/global_step_2/critic/state/rank_1_of_2.safetensors"));
  // The run goes on over three, and then in one process.
  config.trainer.total_training_steps = 3;
  in_parts(3, config);
  config.trainer.total_training_steps = 4;
  config.trainer.default_local_dir = scratch / "two";
  EXPECT_EQ(alone(config).count(4), 1U);
}

TEST(FsdpRun, ACheckpointHasTheSameBitsUnderAnyNumberOfRanks) {
  const ScratchDir scratch("fsdp-bits");
  testing::write_tiny_model(scratch);
  Config config = config_of(scratch, "parts");
  config.trainer.total_training_steps = 2;
  in_parts(3, config);
  const std::string parts = scratch / "parts/global_step_2";
  const auto wanted = loaded(parts, 3, 3);
  expect_same(loaded(parts, 1, 0), wanted);
  expect_same(loaded(parts, 2, 0), wanted);
  expect_same(loaded(parts, 2, 2), wanted);
  expect_same(loaded(parts, 4, 2), wanted);
  config.trainer.default_local_dir = scratch / "whole";
  alone(config);
  const std::string whole = scratch / "whole/global_step_2";
  expect_same(loaded(whole, 4, 4), loaded(whole, 1, 0));
}

// Two updates of one block each, behind two passes that score and the weights of the rollout.
TEST(FsdpRun, AStepSendsTheBytesOfTheFormula) {
  const ScratchDir scratch("fsdp-bytes");
  testing::write_tiny_model(scratch);
  Config config = config_of(scratch, "run");
  config.rollout.dtype = "bfloat16";
  config.actor.ppo_max_token_len_per_gpu = 16384;
  config.trainer.total_training_steps = 2;
  config.trainer.test_freq = -1;
  const Logged logged = in_parts(2, config);
  const auto model =
      models::random_model(testing::tiny_config_json(), 3, {{.dtype = at::kFloat}, false});
  std::vector<int64_t> sizes(model->params().num_units(), 0);
  for (const Param& param : model->params().params()) sizes[param.unit] += param.master.numel();
  int64_t pieces = 0;
  for (const int64_t size : sizes) pieces += (size + 1) / 2;
  for (const int64_t step : {1, 2}) {
    const int64_t gathers = 1 + 2 + 2 * 2;
    const int64_t norms = 2 * 8;
    EXPECT_EQ(logged.at(step).at("comm/shard/all_gather_bytes"), gathers * pieces * 2 + norms);
    EXPECT_EQ(logged.at(step).at("comm/shard/all_to_all_bytes"), 2 * pieces * 4);
  }
}

// Interrupted after two of five steps, under the same number of ranks.
TEST(FsdpRun, AResumedRunHasTheBitsOfAnUndisturbedOne) {
  const ScratchDir scratch("fsdp-resume");
  testing::write_tiny_model(scratch);
  in_parts(2, config_of(scratch, "undisturbed"));
  Config config = config_of(scratch, "interrupted");
  config.trainer.total_training_steps = 2;
  in_parts(2, config);
  config.trainer.total_training_steps = 5;
  in_parts(2, config);
  expect_same(loaded(scratch / "interrupted/global_step_5", 1, 0),
              loaded(scratch / "undisturbed/global_step_5", 1, 0));
}

// What a rank holds of the models lies in files between uses; recompute runs beside it.
TEST(FsdpRun, OffloadedPartsHaveTheSameBits) {
  const ScratchDir scratch("fsdp-offload");
  testing::write_tiny_model(scratch);
  Config config = config_of(scratch, "plain");
  config.algorithm.adv_estimator = "gae";
  config.trainer.total_training_steps = 3;
  in_parts(2, config);
  config.trainer.default_local_dir = scratch / "away";
  config.offload_dir = scratch / "files";
  config.actor.fsdp.offload_policy = true;
  config.critic.fsdp.offload_policy = true;
  config.ref_fsdp_param_offload = true;
  config.model.enable_gradient_checkpointing = true;
  in_parts(2, config);
  expect_same(loaded(scratch / "away/global_step_3", 1, 0),
              loaded(scratch / "plain/global_step_3", 1, 0));
}

TEST(FsdpRun, ADamagedPieceIsRefusedByName) {
  const ScratchDir scratch("fsdp-damage");
  testing::write_tiny_model(scratch);
  Config config = config_of(scratch, "run");
  config.trainer.total_training_steps = 1;
  in_parts(2, config);
  const std::string path = scratch / "run/global_step_1";
  const std::string file = path + "/state/rank_1_of_2.safetensors";
  std::string bytes = io::read_text(file);
  bytes[bytes.size() / 2] ^= 1;
  io::write_bytes(file, bytes);
  try {
    loaded(path, 1, 0);
    FAIL() << "a damaged file was read";
  } catch (const FileError& error) {
    EXPECT_NE(std::string(error.what()).find("rank_1_of_2.safetensors: sha256: wanted"),
              std::string::npos)
        << error.what();
  }
}

TEST(FsdpRun, StrategiesAreCheckedByName) {
  const ScratchDir scratch("fsdp-keys");
  Config config = testing::tiny_config("", "");
  for (const char* strategy : {"fsdp", "fsdp2"}) {
    config.actor.strategy = strategy;
    EXPECT_TRUE(actor_sharding(config).cuts_weights);
    EXPECT_TRUE(reference_sharding(config).cuts_weights);
  }
  config.ref_strategy = "megatron";
  EXPECT_FALSE(reference_sharding(config).cuts_weights);
  config.actor.strategy = "deepspeed";
  EXPECT_THROW(check_sharding(config), std::invalid_argument);
  config.actor.strategy = "fsdp";
  config.algorithm.adv_estimator = "gae";
  config.critic.fsdp.fsdp_size = 4;
  EXPECT_THROW(check_sharding(config), std::invalid_argument);
}

}  // namespace banyan::train
