// SFT, preferences and reward models under every layout of ranks give what one process gives: loss,
// gradients (in the first moments), weights after three steps of AdamW, checkpoints.
#include "banyan/train/finetune_layout.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <utility>

#include "banyan/checkpoint/checkpoint.h"
#include "banyan/testing/fake_finetune_host.h"
#include "banyan/testing/five_groups.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/finetune.h"
#include "banyan/train/objective.h"

namespace banyan::train {
namespace {

using banyan::testing::FakeFinetuneHost;
using banyan::testing::finetune_rows;
using banyan::testing::relative;
using banyan::testing::ScratchDir;

using State = std::map<std::string, at::Tensor>;
using Change = std::function<void(FinetuneConfig&)>;

struct Form {
  std::string name;
  int64_t size;
  Change change;
};

void set_sizes(FinetuneConfig& config, int64_t tensor, int64_t pipeline) {
  config.megatron.tensor_model_parallel_size = tensor;
  config.megatron.pipeline_model_parallel_size = pipeline;
}

std::vector<Form> forms() {
  return {
      {"data parallel", 3, [](FinetuneConfig&) {}},
      {"fsdp", 2, [](FinetuneConfig& c) { c.strategy = "fsdp"; }},
      {"hybrid", 4, [](FinetuneConfig& c) { c.strategy = "fsdp2", c.engine.fsdp_size = 2; }},
      {"fsdp, some without rows",
       7,
       [](FinetuneConfig& c) {
         c.strategy = "fsdp";
         c.engine.forward_prefetch = true;
         c.engine.reshard_after_forward = false;
         c.fsdp_reduce_each_block = false;
       }},
      {"tensor", 2, [](FinetuneConfig& c) { set_sizes(c, 2, 1); }},
      {"tensor, sequence",
       2,
       [](FinetuneConfig& c) { set_sizes(c, 2, 1), c.megatron.sequence_parallel = true; }},
      {"stages", 2, [](FinetuneConfig& c) { set_sizes(c, 1, 2); }},
      {"chunks",
       2,
       [](FinetuneConfig& c) {
         set_sizes(c, 1, 2);
         c.megatron.virtual_pipeline_model_parallel_size = 2;
       }},
      {"tensor, stages, data",
       8,
       [](FinetuneConfig& c) { set_sizes(c, 2, 2), c.megatron.sequence_parallel = true; }},
      {"ranges", 2, [](FinetuneConfig& c) { c.megatron.context_parallel_size = 2; }},
      {"heads", 2, [](FinetuneConfig& c) { c.ulysses_sequence_parallel_size = 2; }},
      {"ranges, tensor",
       4,
       [](FinetuneConfig& c) { set_sizes(c, 2, 1), c.megatron.context_parallel_size = 2; }},
      {"heads, fsdp",
       4,
       [](FinetuneConfig& c) { c.ulysses_sequence_parallel_size = 2, c.strategy = "fsdp"; }},
  };
}

bool is_mixed(const Form& form) { return form.name.find(',') != std::string::npos; }

std::string four_layers() {
  std::string config = testing::tiny_config_json();
  config.replace(config.find("num_hidden_layers\": 2"), 21, "num_hidden_layers\": 4");
  return config;
}

FinetuneConfig config_of(const ScratchDir& scratch,
                         const std::string& objective,
                         const std::string& run) {
  FinetuneConfig config = testing::tiny_finetune_config(scratch / "model", scratch / run);
  if (objective != "sft") config.preference = testing::tiny_preference(objective);
  config.dtype = "float64";
  config.data.train_batch_size = 5;
  config.data.max_token_len_per_gpu = 16;  // trunks and pairs are cut
  config.optim.lr = 1e-3;
  config.trainer.total_training_steps = 3;
  config.trainer.save_freq = -1;
  config.trainer.test_freq = 2;
  config.trainer.val_before_train = false;
  config.num_train_rows = 10;
  config.num_val_rows = 3;
  return config;
}

using Logged = std::map<int64_t, Metrics>;

// [ranks]
std::vector<Logged> run_over(int64_t size, const FinetuneConfig& config) {
  std::vector<Logged> logged(size);
  const int32_t samples = config.preference ? 2 : 1;
  const auto run = [&](parallel::Groups* groups, Logged& into) {
    FakeFinetuneHost host(finetune_rows(10, samples), finetune_rows(3, samples));
    finetune(config, host, groups);
    into = host.logged;
  };
  if (size == 1) {
    run(nullptr, logged[0]);
    return logged;
  }
  testing::run_mesh(size, finetune_mesh(config), [&](parallel::Groups& groups) {
    run(&groups, logged[groups.world.rank()]);
  });
  return logged;
}

// Masters and moments of a checkpoint as one process loads it.
State state_of(const FinetuneConfig& config, int64_t step) {
  const auto model =
      models::load_model(config.model.path, finetune_load_options(config, /*notes=*/nullptr));
  optim::AdamW optimizer(model->params(), adamw_options(config.optim));
  checkpoint::load(
      config.trainer.default_local_dir + "/global_step_" + std::to_string(step), *model, optimizer);
  State out;
  const std::vector<Param>& params = model->params().params();
  for (size_t i = 0; i < params.size(); ++i) {
    out[params[i].name] = params[i].master;
    out["m." + params[i].name] = optimizer.first_moments()[i];
    out["v." + params[i].name] = optimizer.second_moments()[i];
  }
  return out;
}

void expect_near(const State& a, const State& b, double bound, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [name, tensor] : b) {
    EXPECT_LE(relative(a.at(name), tensor), bound) << what << " " << name;
  }
}

void expect_near(const Logged& a, const Logged& b, double bound, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [step, metrics] : b) {
    for (const auto& [name, value] : metrics) {
      const bool is_result = name.starts_with("train/") || name.starts_with("val/") ||
                             name.starts_with("rewards/") || name.starts_with("logps/");
      // A policy that is its reference has margins of 0, up to rounding.
      const bool is_tied = name.ends_with("rewards/accuracies") && step == 1;
      if (!is_result || is_tied) continue;
      EXPECT_NEAR(a.at(step).at(name), value, bound * std::max(1.0, std::abs(value)))
          << what << " " << name << " step " << step;
    }
  }
}

class FinetuneLayout : public ::testing::TestWithParam<std::string> {};

}  // namespace

TEST_P(FinetuneLayout, EqualsOneProcessUnderEveryForm) {
  const ScratchDir scratch("finetune-layout");
  testing::write_tiny_model(scratch, 1, four_layers());
  FinetuneConfig config = config_of(scratch, GetParam(), "one");
  const Logged one = run_over(1, config)[0];
  const State last = state_of(config, 3);
  EXPECT_GT(one.at(1).at("train/grad_norm"), 0.0);
  for (const Form& form : forms()) {
    if (GetParam() != "sft" && is_mixed(form)) continue;
    FinetuneConfig other = config;
    other.trainer.default_local_dir = scratch / form.name;
    form.change(other);
    for (const Logged& rank : run_over(form.size, other)) {
      expect_near(rank, one, 1e-10, form.name);
    }
    expect_near(state_of(other, 3), last, 1e-8, form.name);
  }
}

INSTANTIATE_TEST_SUITE_P(All,
                         FinetuneLayout,
                         ::testing::Values("sft", "dpo", "reward_model"),
                         [](const auto& info) { return info.param; });

// Without sharing; the reference is scored before the first step, its rows spread over the ranks.
TEST(FinetuneLayout, DenseBatchesAndAReferenceThatIsScoredBefore) {
  const ScratchDir scratch("finetune-dense");
  testing::write_tiny_model(scratch, 1, four_layers());
  FinetuneConfig config = config_of(scratch, "dpo", "one");
  config.sharing.mode = "off";
  config.preference->precompute_ref_log_probs = true;
  const Logged one = run_over(1, config)[0];
  for (const Form& form : forms()) {
    if (is_mixed(form)) continue;
    FinetuneConfig other = config;
    other.trainer.default_local_dir = scratch / form.name;
    form.change(other);
    expect_near(run_over(form.size, other)[0], one, 1e-10, form.name);
  }
}

TEST(FinetuneLayout, ExpertsAreDealtOutAndCut) {
  const ScratchDir scratch("finetune-experts");
  testing::write_tiny_model(scratch, 1, testing::tiny_moe_config_json());
  FinetuneConfig config = config_of(scratch, "dpo", "one");
  const Logged one = run_over(1, config)[0];
  const State last = state_of(config, 3);
  config.megatron.expert_model_parallel_size = 2;
  for (const auto& [tensor, stages] : {std::pair{1, 1}, {2, 1}, {1, 2}}) {
    const std::string name = "experts, " + std::to_string(tensor) + ", " + std::to_string(stages);
    set_sizes(config, tensor, stages);
    config.trainer.default_local_dir = scratch / name;
    expect_near(run_over(2 * tensor * stages, config)[0], one, 1e-10, name);
    expect_near(state_of(config, 3), last, 1e-8, name);
  }
}

// Each step under a layout of its own.
TEST(FinetuneLayout, ARunGoesOnUnderAnyOtherLayout) {
  const ScratchDir scratch("finetune-resume");
  testing::write_tiny_model(scratch, 1, four_layers());
  FinetuneConfig config = config_of(scratch, "sft", "one");
  config.trainer.total_training_steps = 6;
  run_over(1, config);
  const State wanted = state_of(config, 6);
  config.trainer.default_local_dir = scratch / "changing";
  int64_t step = 0;
  for (const char* name : {"tensor, stages, data", "hybrid", "ranges", "chunks", "heads, fsdp"}) {
    for (const Form& form : forms()) {
      if (form.name != name) continue;
      FinetuneConfig other = config;
      form.change(other);
      other.trainer.total_training_steps = ++step;
      run_over(form.size, other);
    }
  }
  EXPECT_EQ(step, 5);
  run_over(1, config);
  expect_near(state_of(config, 6), wanted, 1e-8, "changing");
}

TEST(FinetuneLayout, TwoRunsHaveTheSameBits) {
  const ScratchDir scratch("finetune-bits");
  testing::write_tiny_model(scratch, 1, four_layers());
  for (const Form& form : forms()) {
    if (is_mixed(form)) continue;
    FinetuneConfig config = config_of(scratch, "dpo", form.name);
    config.dtype = "bfloat16";
    config.num_val_rows = 0;
    form.change(config);
    run_over(form.size, config);
    const State first = state_of(config, 3);
    config.trainer.default_local_dir = scratch / (form.name + " again");
    run_over(form.size, config);
    for (const auto& [name, tensor] : state_of(config, 3)) {
      EXPECT_TRUE(tensor.equal(first.at(name))) << form.name << " " << name;
    }
  }
}

TEST(FinetuneLayout, WhatDoesNotGoTogetherIsRefusedUnderTheKeysOfTheRun) {
  const ScratchDir scratch("finetune-refused");
  testing::write_tiny_model(scratch, 1, four_layers());
  const auto refusal = [&](int64_t size, const Change& change) -> std::string {
    FinetuneConfig config = config_of(scratch, "dpo", "run");
    change(config);
    try {
      run_over(size, config);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  const auto expect_refused = [&](int64_t size, const std::string& text, const Change& change) {
    EXPECT_NE(refusal(size, change).find(text), std::string::npos) << refusal(size, change);
  };
  expect_refused(2,
                 "[config] engine.strategy: wanted megatron or null with "
                 "engine.tensor_model_parallel_size=2, got fsdp",
                 [](FinetuneConfig& c) { set_sizes(c, 2, 1), c.strategy = "fsdp"; });
  expect_refused(2,
                 "[config] engine.ulysses_sequence_parallel_size: wanted 1 with "
                 "engine.context_parallel_size=2, got 2",
                 [](FinetuneConfig& c) {
                   c.megatron.context_parallel_size = c.ulysses_sequence_parallel_size = 2;
                 });
  expect_refused(3, "engine.ulysses_sequence_parallel_size", [](FinetuneConfig& c) {
    c.ulysses_sequence_parallel_size = 3;
  });
  expect_refused(1,
                 "[config] engine.pipeline_model_parallel_size: wanted a divisor of the number of "
                 "processes (1), got 2; start them with torchrun --nproc-per-node N -m "
                 "banyan.trainer.sft_trainer",
                 [](FinetuneConfig& c) { set_sizes(c, 1, 2); });
  expect_refused(1,
                 "[config] engine.expert_model_parallel_size: wanted a divisor of the number of "
                 "processes (1), got 2",
                 [](FinetuneConfig& c) { c.megatron.expert_model_parallel_size = 2; });
  expect_refused(1,
                 "[config] engine.expert_tensor_parallel_size: wanted a divisor of the number of "
                 "processes (1), got 2",
                 [](FinetuneConfig& c) { c.megatron.expert_tensor_parallel_size = 2; });
  expect_refused(3,
                 "[config] engine.tensor_model_parallel_size: wanted a multiple of "
                 "num_key_value_heads (2) or at most that many, got 3",
                 [](FinetuneConfig& c) { set_sizes(c, 3, 1); });
  expect_refused(2,
                 "[config] engine.expert_model_parallel_size: wanted 1 for a model without experts",
                 [](FinetuneConfig& c) { c.megatron.expert_model_parallel_size = 2; });
  expect_refused(3,
                 "[config] engine.tensor_model_parallel_size: wanted a divisor of the number of "
                 "processes (3), got 2",
                 [](FinetuneConfig& c) { set_sizes(c, 2, 1); });
  expect_refused(1, "[config] engine.strategy: wanted fsdp, fsdp2", [](FinetuneConfig& c) {
    c.strategy = "deepspeed";
  });
}

}  // namespace banyan::train
