// The keys that save memory, in whole runs: they change no bit, and wrong ones are named.
#include <gtest/gtest.h>

#include <algorithm>

#include "banyan/testing/fake_host.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/memory_keys.h"
#include "banyan/train/offload.h"
#include "banyan/train/trainer.h"

namespace banyan::train {
namespace {

using testing::FakeHost;
using testing::masters;
using testing::ScratchDir;
using testing::tiny_prompts;

Score even_share(const Trajectory& trajectory) {
  return testing::share_of_tokens(trajectory, [](int32_t token) { return token % 2 == 0; });
}

void expect_equal_checkpoints(const std::string& a, const std::string& b) {
  for (const char* part : {"", "/critic"}) {
    const auto want = masters(a + part);
    const auto got = masters(b + part);
    ASSERT_EQ(want.size(), got.size());
    for (const auto& [name, tensor] : want) EXPECT_TRUE(tensor.equal(got.at(name))) << name;
  }
}

// Everything that has a part in it: a critic, a reference, a run that is resumed.
Config whole_config(const std::string& model, const std::string& run) {
  Config config = testing::tiny_config(model, run);
  config.algorithm.adv_estimator = "gae";
  config.actor.use_kl_loss = true;
  config.trainer.total_training_steps = 3;
  config.trainer.save_freq = 1;
  return config;
}

TEST(MemoryKeys, ChangeNoBitOfARun) {
  const ScratchDir scratch("memory");
  const std::string model = testing::write_tiny_model(scratch);
  const Config plain = whole_config(model, scratch / "plain");
  FakeHost host(tiny_prompts(), even_share);
  const TrainSummary want = train(plain, host);

  Config saving = whole_config(model, scratch / "saving");
  saving.offload_dir = scratch / "away";
  saving.actor.fsdp.offload_policy = true;
  MegatronConfig& megatron = saving.critic.megatron;
  megatron.param_offload = megatron.grad_offload = megatron.optimizer_offload = true;
  saving.ref_fsdp_param_offload = true;
  saving.model.enable_gradient_checkpointing = true;
  RecomputeConfig& recompute = saving.critic.megatron.recompute;
  recompute.recompute_granularity = "selective";
  recompute.recompute_modules = {"core_attn", "mlp", "layernorm"};
  saving.actor.ppo_max_token_len_per_gpu = {};
  saving.critic.ppo_max_token_len_per_gpu = {};
  FakeHost first(tiny_prompts(), even_share);
  first.stop_after = 1;
  train(saving, first);
  EXPECT_TRUE(std::any_of(first.said.begin(), first.said.end(), [](const std::string& line) {
    return line.rfind("actor: blocks of at most ", 0) == 0 &&
           line.find("(actor_rollout_ref.actor.ppo_max_token_len_per_gpu is null)") !=
               std::string::npos;
  }));
  EXPECT_EQ(first.logged.at(1).at("trie/blocks"), 1.0);
  FakeHost second(tiny_prompts(), even_share);
  const TrainSummary got = train(saving, second);
  EXPECT_EQ(got.first_step, 1);
  EXPECT_TRUE(std::any_of(second.said.begin(), second.said.end(), [](const std::string& line) {
    return line.find("token_budget.json has it") != std::string::npos;
  }));
  expect_equal_checkpoints(want.checkpoint, got.checkpoint);
  EXPECT_TRUE(std::filesystem::is_empty(scratch / "away"));
}

RecomputeConfig keys(const char* granularity) {
  RecomputeConfig config;
  if (granularity != nullptr) config.recompute_granularity = granularity;
  config.recompute_modules = {"core_attn"};
  return config;
}

std::string error_of(const RecomputeConfig& config) {
  try {
    recompute_of(/*checkpointing=*/false, config, "node");
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

TEST(MemoryKeys, MegatronsRulesOfRecompute) {
  EXPECT_EQ(recompute_of(false, keys(nullptr), "node").method, nn::RecomputeMethod::kNone);
  const nn::Recompute checkpointing = recompute_of(true, keys(nullptr), "node");
  EXPECT_EQ(checkpointing.method, nn::RecomputeMethod::kUniform);
  EXPECT_EQ(checkpointing.num_layers, 1);

  RecomputeConfig full = keys("full");
  full.recompute_method = "block";
  full.recompute_num_layers = 3;
  EXPECT_EQ(recompute_of(true, full, "node").method, nn::RecomputeMethod::kBlock);
  EXPECT_EQ(recompute_of(true, full, "node").num_layers, 3);
  full.recompute_method = "uniform";
  EXPECT_EQ(recompute_of(false, full, "node").method, nn::RecomputeMethod::kUniform);
  full.recompute_num_layers = {};
  EXPECT_EQ(error_of(full),
            "[config] node.recompute_num_layers: wanted a number of layers with "
            "recompute_granularity=full, got null");
  full.recompute_method = {};
  EXPECT_EQ(error_of(full),
            "[config] node.recompute_method: wanted uniform or block with "
            "recompute_granularity=full, got null");

  RecomputeConfig selective = keys("selective");
  selective.recompute_modules = {"mlp", "moe_act"};
  const nn::Recompute some = recompute_of(false, selective, "node");
  EXPECT_TRUE(some.drops_gate_up(false) && !some.drops_core_attn());
  selective.recompute_modules = {"mpl"};
  EXPECT_EQ(error_of(selective),
            "[config] node.recompute_modules: wanted some of core_attn, mlp, layernorm, moe, "
            "moe_act, mla_up_proj and shared_experts, got mpl");
  selective.recompute_num_layers = 1;
  EXPECT_EQ(error_of(selective),
            "[config] node.recompute_num_layers: wanted null with "
            "recompute_granularity=selective, which acts in every layer, got 1");
  EXPECT_EQ(error_of(keys("half")),
            "[config] node.recompute_granularity: wanted full, selective or null, got half");
}

TEST(MemoryKeys, OffloadWithoutAFolderIsSaid) {
  const ScratchDir scratch("memory");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "run");
  config.trainer.total_training_steps = 1;
  config.actor.megatron.optimizer_offload = true;
  FakeHost host(tiny_prompts(), even_share);
  train(config, host);
  EXPECT_EQ(std::count(host.said.begin(), host.said.end(), std::string(kWantsFolder)), 1);
}

}  // namespace
}  // namespace banyan::train
