// The rollout cut over ranks by keys of its own, whatever cuts the training: whole runs give what
// one process gives. The ranks are threads here; tests/distributed runs the same over processes.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "banyan/testing/layout_run.h"
#include "banyan/train/local_sampler.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/trainer_mode.h"

namespace banyan::train {
namespace {

using banyan::testing::parallel_refusal;
using banyan::testing::run_layout;
using banyan::testing::ScratchDir;
using parallel::Groups;

Config layout_config(const ScratchDir& scratch) {
  return testing::layout_config(scratch, testing::tiny_config_json());
}

void set_tensor(int64_t size, Config& config) {
  for (MegatronConfig* megatron : {&config.actor.megatron, &config.critic.megatron}) {
    megatron->tensor_model_parallel_size = size;
    megatron->sequence_parallel = true;
  }
  config.ref_tensor_model_parallel_size = size;
}

void set_stages(int64_t size, Config& config) {
  config.actor.megatron.pipeline_model_parallel_size = size;
  config.critic.megatron.pipeline_model_parallel_size = size;
  config.ref_pipeline_model_parallel_size = size;
}

// Twelve experts, which two, three and four ranks share.
std::string wide_moe_config() {
  std::string config = testing::tiny_moe_config_json();
  const std::string six = "\"num_experts\": 6";
  return config.replace(config.find(six), six.size(), "\"num_experts\": 12");
}

struct Case {
  const char* name;
  int64_t processes;
  int64_t rollout;  // rollout.tensor_model_parallel_size
  std::function<void(Config&)> train;
  bool runs_twice = false;  // and has the same bits
};

void expect_as_one(const ScratchDir& scratch,
                   const Config& config,
                   const testing::Ended& one,
                   const Case& each) {
  Config other = config;
  other.trainer.default_local_dir = scratch / each.name;
  other.rollout.tensor_model_parallel_size = each.rollout;
  each.train(other);
  const auto first = run_layout(each.processes, other);
  for (int64_t r = 0; r < each.processes - num_rollout_ranks(other); ++r) {
    testing::expect_same_run(first[r], one, each.name);
  }
  if (!each.runs_twice) return;
  other.trainer.default_local_dir = scratch / (std::string(each.name) + "-again");
  const auto second = run_layout(each.processes, other);
  testing::expect_same_run(second[0], first[0], each.name, /*bound=*/0.0);
}

}  // namespace

TEST(RolloutLayout, WhateverCutsTheTrainingARunIsThatOfOneProcess) {
  const ScratchDir scratch("rollout-layout");
  const Config config = layout_config(scratch);
  const testing::Ended one = run_layout(1, config)[0];
  for (const Case& each : {
           Case{"data4", 4, 2, [](Config&) {}},
           Case{"in place", 4, 2, [](Config& c) { set_tensor(2, c); }, /*runs_twice=*/true},
           Case{"wider", 4, 4, [](Config& c) { set_tensor(2, c); }},
           Case{"stages", 2, 2, [](Config& c) { set_stages(2, c); }},
           Case{"parts", 2, 2, [](Config& c) { c.actor.strategy = "fsdp"; }, /*runs_twice=*/true},
       }) {
    expect_as_one(scratch, config, one, each);
  }
}

TEST(RolloutLayout, SoAreRanksThatOnlyGenerate) {
  const ScratchDir scratch("rollout-layout-separate");
  const Config config = layout_config(scratch);
  const testing::Ended one = run_layout(1, config)[0];
  const auto separate = [](int64_t rollout, int64_t tensor) {
    return [=](Config& other) {
      other.hybrid_engine = false;
      other.rollout.nnodes = rollout;
      if (tensor > 1) set_tensor(tensor, other);
    };
  };
  for (const Case& each : {Case{"1+2", 3, 2, separate(2, 1), /*runs_twice=*/true},
                           Case{"2+4", 6, 2, separate(4, 2)}}) {
    expect_as_one(scratch, config, one, each);
  }
}

// Ranks without a response left take part in the passes of the others.
TEST(RolloutLayout, SoAreExpertsThatAreDealtOutForTheRollout) {
  const ScratchDir scratch("rollout-layout-experts");
  Config config = testing::layout_config(scratch, wide_moe_config());
  config.actor.router.moe_aux_loss_coeff = 0.01;
  const testing::Ended one = run_layout(1, config)[0];
  const auto experts = [](int64_t ranks) {
    return [=](Config& other) {
      other.rollout.data_parallel_size = other.rollout.expert_parallel_size = ranks;
    };
  };
  const auto in_place = [&](Config& other) {
    experts(2)(other);
    other.actor.megatron.expert_model_parallel_size = 2;
    other.critic.megatron.expert_model_parallel_size = 2;
    other.ref_expert_model_parallel_size = 2;
  };
  // Whole experts over two ranks that hold the rest together, or over two such pairs.
  const auto whole = [](int64_t pairs) {
    return [=](Config& other) {
      other.rollout.data_parallel_size = pairs;
      other.rollout.expert_parallel_size = 2 * pairs;
    };
  };
  const auto whole_in_place = [&](Config& other) {
    whole(1)(other);
    set_tensor(2, other);
    for (MegatronConfig* megatron : {&other.actor.megatron, &other.critic.megatron}) {
      megatron->expert_model_parallel_size = 2;
      megatron->expert_tensor_parallel_size = 1;
    }
    other.ref_expert_model_parallel_size = 2;
    other.ref_expert_tensor_parallel_size = 1;
  };
  const auto separate = [&](Config& other) {
    experts(2)(other);
    other.hybrid_engine = false;
    other.rollout.nnodes = 2;
  };
  const auto parts = [&](Config& other) {
    experts(2)(other);
    other.actor.strategy = "fsdp";
  };
  for (const Case& each : {Case{"two", 2, 1, experts(2), /*runs_twice=*/true},
                           Case{"three", 3, 1, experts(3)},
                           Case{"cut", 2, 2, [](Config&) {}},
                           Case{"in place", 2, 1, in_place},
                           Case{"parts", 2, 1, parts},
                           Case{"whole", 2, 2, whole(1)},
                           Case{"whole of four", 4, 2, whole(2)},
                           Case{"whole in place", 2, 2, whole_in_place},
                           Case{"separate", 3, 1, separate}}) {
    expect_as_one(scratch, config, one, each);
  }
}

// In bf16 the rollout and a training that is cut alike multiply the same parts and add them in the
// same order, so the ratio of the first update is one up to the rounding of one fp32 sum.
TEST(RolloutLayout, CutAlikeTheLogProbabilitiesAgree) {
  const ScratchDir scratch("rollout-layout-bits");
  Config config = layout_config(scratch);
  config.rollout.dtype = "bfloat16";
  config.force_old_log_prob = true;
  config.rollout.tensor_model_parallel_size = 2;
  set_tensor(2, config);
  const auto alike = run_layout(2, config)[0].logged;
  set_tensor(1, config);
  config.trainer.default_local_dir = scratch / "other";
  const auto other = run_layout(2, config)[0].logged;
  const char* name = "training/rollout_probs_diff_max";
  for (const auto& [step, metrics] : alike) {
    EXPECT_LT(metrics.at(name), 2e-6) << step;
    EXPECT_GT(other.at(step).at(name), 2e-5) << step;
  }
}

// Shares of a rollout end when their groups are whole, greedy baselines are generated, what was cut
// off goes on, and each trajectory is scored once.
TEST(RolloutLayout, TheRulesOfSamplingHold) {
  const ScratchDir scratch("rollout-layout-rules");
  testing::write_tiny_model(scratch);
  Config config = testing::tiny_config(scratch / "model", scratch / "one");
  config.rollout.dtype = "float32";
  config.algorithm.adv_estimator = "remax";
  config.algorithm.filter_groups.enable = true;
  config.rollout.train.n = 2;
  config.rollout.over_sample_rate = 0.34;
  config.partial_rollout = true;
  config.rollout.max_num_seqs = 12;
  config.rollout.response_length = 24;
  config.num_train_rows = 20;
  config.actor.optim.lr = 1e-3;
  std::map<int64_t, int64_t> scored;  // by processes
  const auto run = [&](int64_t size) {
    std::mutex mutex;
    std::vector<testing::Ended> ended(size);
    const auto train_one = [&](Groups* groups, testing::Ended& into) {
      testing::FakeHost host(testing::tiny_prompts(20), [&](const Trajectory& trajectory) {
        const std::lock_guard lock(mutex);
        ++scored[size];
        return testing::thirds(trajectory);
      });
      train(config, host, nullptr, groups);
      into = {host.logged, host.last_trajectories};
    };
    if (size == 1) {
      train_one(nullptr, ended[0]);
      return ended;
    }
    testing::run_mesh(size, mesh_shape(config), [&](Groups& groups) {
      train_one(&groups, ended[groups.world.rank()]);
    });
    return ended;
  };
  const testing::Ended one = run(1)[0];
  double resumed = 0.0;
  for (const auto& [step, metrics] : one.logged) resumed += metrics.at("rollout/resumed_responses");
  EXPECT_GT(resumed, 0.0);
  config.trainer.default_local_dir = scratch / "two";
  config.rollout.tensor_model_parallel_size = 2;
  for (const testing::Ended& rank : run(2)) testing::expect_same_run(rank, one, "two");
  EXPECT_EQ(scored[2], scored[1]);
}

// Whole experts on both sides, and keys of experts that a dense model does not have.
TEST(RolloutLayout, WeightsThatLieAlikeGenerateInPlace) {
  for (const bool dense : {true, false}) {
    const ScratchDir scratch("rollout-layout-alike");
    const std::string model = dense ? testing::tiny_config_json() : wide_moe_config();
    Config config = testing::tiny_config(testing::write_tiny_model(scratch, 1, model), "");
    set_tensor(2, config);
    config.actor.megatron.expert_tensor_parallel_size = 1;
    config.actor.megatron.expert_model_parallel_size = dense ? 1 : 2;
    config.rollout.tensor_model_parallel_size = 2;
    config.rollout.expert_parallel_size = dense ? 1 : 2;
    testing::run_mesh(2, mesh_shape(config), [&](Groups& groups) {
      models::LoadOptions options{{.dtype = at::kFloat}, true};
      set_cut(/*sequence_parallel=*/false, groups, options);
      set_experts(config, groups, options);
      EXPECT_TRUE(lies_as_rollout(*models::load_model(config.model.path, options), groups));
    });
  }
}

TEST(RolloutLayout, SizesThatDoNotGoTogetherAreRefusedByName) {
  const auto refusal = [](const std::function<void(RolloutConfig&)>& change) {
    Config config = testing::tiny_config("", "");
    change(config.rollout);
    return parallel_refusal(config);
  };
  const auto expect = [&](const std::function<void(RolloutConfig&)>& change,
                          const std::string& text) {
    EXPECT_NE(refusal(change).find(text), std::string::npos) << refusal(change);
  };
  EXPECT_EQ(refusal([](RolloutConfig& r) { r.tensor_model_parallel_size = 2; }), "");
  expect([](RolloutConfig& r) { r.expert_parallel_size = 3; },
         "actor_rollout_ref.rollout.expert_parallel_size: wanted 1, or tensor_model_parallel_size "
         "times data_parallel_size (1), got 3");
  expect(
      [](RolloutConfig& r) { r.data_parallel_size = 2; },
      "actor_rollout_ref.rollout.data_parallel_size: wanted 1 with expert_parallel_size=1, got 2");
  Config config = testing::tiny_config("", "");
  config.rollout.tensor_model_parallel_size = 2;
  const auto mesh_refusal = [&](int64_t size) {
    try {
      parallel::Mesh(size, mesh_shape(config));
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(mesh_refusal(3).find("actor_rollout_ref.rollout.tensor_model_parallel_size: wanted a "
                                 "divisor of the number of processes that generate (3), got 2"),
            std::string::npos);
  config.hybrid_engine = false;
  config.rollout.nnodes = 1;
  EXPECT_NE(mesh_refusal(2).find("that generate (1), got 2"), std::string::npos);

  const ScratchDir scratch("rollout-layout-refusal");
  Config dense = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "run");
  const auto run_refusal = [&](int64_t size) {
    try {
      run_layout(size, dense);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  dense.rollout.tensor_model_parallel_size = 3;
  const std::string heads = run_refusal(3);
  EXPECT_TRUE(
      heads.starts_with("[config] actor_rollout_ref.rollout.tensor_model_parallel_size: wanted a "
                        "multiple of num_key_value_heads (2)"))
      << heads;
  dense.rollout.tensor_model_parallel_size = 1;
  dense.rollout.data_parallel_size = dense.rollout.expert_parallel_size = 2;
  for (const bool separate : {false, true}) {
    dense.hybrid_engine = !separate;
    dense.rollout.nnodes = separate ? 2 : 0;
    const std::string text = run_refusal(separate ? 3 : 2);
    EXPECT_NE(text.find("actor_rollout_ref.rollout.expert_parallel_size: wanted 1 for a model "
                        "without experts, got 2"),
              std::string::npos)
        << text;
  }
}

// By a folder that holds no weights: whoever loaded them would fail otherwise.
TEST(RolloutLayout, AModelThatCannotBeCutIsRefusedOnEveryRankBeforeAModelLoads) {
  const ScratchDir scratch("rollout-layout-early");
  std::ofstream(scratch / "config.json") << testing::tiny_config_json();
  Config config = testing::tiny_config(scratch / "", scratch / "run");
  config.rollout.tensor_model_parallel_size = 3;
  for (const bool separate : {false, true}) {
    const int64_t size = separate ? 4 : 3;
    config.hybrid_engine = !separate;
    config.rollout.nnodes = separate ? 3 : 0;
    std::vector<std::string> refusals(size);
    testing::run_mesh(size, mesh_shape(config), [&](parallel::Groups& groups) {
      testing::FakeHost host(testing::tiny_prompts(), testing::thirds);
      const int64_t rank = only_generates(groups) ? groups.hand_over.rank() : groups.world.rank();
      try {
        train(config, host, nullptr, &groups);
      } catch (const std::exception& error) {
        refusals[rank] = error.what();
      }
    });
    for (const std::string& refusal : refusals) {
      EXPECT_EQ(refusal,
                "[config] actor_rollout_ref.rollout.tensor_model_parallel_size: wanted a multiple "
                "of num_key_value_heads (2) or at most that many, got 3");
    }
  }
}

// The trainer's token budget counts on it.
TEST(RolloutLayout, ASecondModelThatStaysSaysWhatItWillTake) {
  const ScratchDir scratch("rollout-layout-bytes");
  Config config = layout_config(scratch);
  const auto coming = [&](bool in_parts, bool frees) {
    config.rollout.free_cache_engine = frees;
    Sharding sharding;
    sharding.cuts_weights = in_parts;
    int64_t bytes = -1;
    testing::run_mesh(2, {}, [&](parallel::Groups& groups) {
      testing::FakeHost host(testing::tiny_prompts(), testing::thirds);
      std::unique_ptr<parallel::Fsdp> fsdp;
      const auto actor =
          load_sharded(config.model.path, {{.dtype = at::kBFloat16}, true}, sharding, groups, fsdp);
      const GeneratorFactory none;
      const LocalSampler sampler(config, host, none, groups, *actor, fsdp.get());
      if (groups.world.is_first()) bytes = sampler.coming_bytes();
    });
    return bytes;
  };
  const auto whole = models::load_model(config.model.path, {{.dtype = at::kFloat}, false});
  const int64_t numbers = whole->params().num_elements();
  EXPECT_EQ(coming(/*in_parts=*/true, /*frees=*/false), 4 * numbers);
  EXPECT_EQ(coming(/*in_parts=*/true, /*frees=*/true), 0);
  EXPECT_EQ(coming(/*in_parts=*/false, /*frees=*/false), 0);
  config.rollout.dtype = "bfloat16";
  EXPECT_EQ(coming(/*in_parts=*/true, /*frees=*/false), 2 * numbers);
}

}  // namespace banyan::train
