// A tiny model with experts through the whole loop: rollout, scoring and update, its losses and
// metrics, sharing on and off.
#include <gtest/gtest.h>

#include "banyan/testing/fake_host.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/trainer.h"

namespace banyan::train {
namespace {

using banyan::testing::FakeHost;
using banyan::testing::masters;
using banyan::testing::ScratchDir;
using banyan::testing::tiny_prompts;

Score lucky_share(const Trajectory& trajectory) {
  return testing::share_of_tokens(trajectory, [](int32_t token) { return token % 7 == 0; });
}

struct Outcome {
  std::map<int64_t, Metrics> logged;
  std::map<std::string, at::Tensor> before, after;
};

Outcome three_steps(const std::string& mode, bool with_losses) {
  const ScratchDir scratch("moe");
  const std::string model = testing::write_tiny_model(scratch, 1, testing::tiny_moe_config_json());
  Config config = testing::tiny_config(model, scratch / "run");
  config.trainer.total_training_steps = 3;
  config.sharing.mode = mode;
  config.actor.ppo_mini_batch_size = 2;
  if (with_losses)
    config.actor.router = {
        .moe_aux_loss_coeff = 0.1, .moe_z_loss_coeff = 0.01, .moe_router_dtype = {}};
  FakeHost host(tiny_prompts(), lucky_share);
  train(config, host);
  Outcome run;
  for (const auto& [step, metrics] : host.logged) run.logged[step] = metrics;
  const io::SafetensorsFile file(model + "/model.safetensors");
  for (const auto& [name, entry] : file.entries()) run.before[name] = file.read(name);
  run.after = masters(scratch / "run/global_step_3");
  return run;
}

TEST(MoeRun, TrainsEveryKindOfParameter) {
  const Outcome run = three_steps("on", /*with_losses=*/false);
  for (const int64_t step : {1, 2, 3}) {
    const Metrics& metrics = run.logged.at(step);
    EXPECT_GT(metrics.at("actor/grad_norm"), 0.0);
    EXPECT_EQ(metrics.at("training/rollout_probs_diff_valid"), 1.0);
    EXPECT_EQ(metrics.at("training/rollout_probs_diff_max"), 0.0) << "step " << step;
    EXPECT_GE(metrics.at("actor/moe_load_balance"), 0.5);
    EXPECT_GE(metrics.at("actor/moe_load_max"), 1.0);
    EXPECT_LE(metrics.at("actor/moe_load_max"), 3.0);  // every second choice
    EXPECT_EQ(metrics.at("actor/moe_aux_loss"), 0.0);
  }
  ASSERT_EQ(run.after.size(), run.before.size());
  int64_t moved_experts = 0;
  for (const auto& [name, after] : run.after) {
    const bool moved = !after.equal(run.before.at(name).view_as(after));
    if (name.find(".experts.") != std::string::npos) {
      moved_experts += moved ? 1 : 0;
    } else {
      EXPECT_TRUE(moved) << name;
    }
  }
  EXPECT_GE(moved_experts, 6);
  EXPECT_TRUE(run.after.contains("model.layers.0.mlp.up_proj.weight"));
  EXPECT_TRUE(run.after.contains("model.layers.1.mlp.experts.5.down_proj.weight"));
}

// The first rollout has the same bits, and a shared token counts once for each of its samples.
TEST(MoeRun, LossesAndLoadsAreThoseWithoutSharing) {
  const Outcome on = three_steps("on", /*with_losses=*/true);
  const Outcome off = three_steps("off", /*with_losses=*/true);
  for (const char* name :
       {"actor/moe_load_balance", "actor/moe_load_max", "actor/moe_z", "actor/moe_aux_loss"}) {
    const double wanted = off.logged.at(1).at(name);
    EXPECT_NEAR(on.logged.at(1).at(name), wanted, 0.02 * wanted) << name;
    EXPECT_GT(wanted, 0.0);
  }
}

}  // namespace
}  // namespace banyan::train
