// Fully sharded training: what ranks that hold a part of the weights each compute is what one
// process computes. The ranks are threads; tests/distributed runs the same over processes.
#include "banyan/parallel/fsdp.h"

#include <gtest/gtest.h>

#include <mutex>

#include "banyan/testing/sharded_steps.h"

namespace banyan::train {

using namespace banyan::testing::sharded;
using parallel::Collectives;
using parallel::FsdpOptions;
using parallel::Groups;
using testing::expect_near;
using testing::relative;
using testing::small_blocks;

TEST(Fsdp, UpdatesEqualOneProcess) {
  const Config config = small_blocks();
  const std::vector<Setting> settings = {
      {.name = "trie fp64", .dtype = at::kDouble},
      {.name = "dense fp32", .share = false},
      {.name = "kept, fetched ahead", .options = {false, true}},
      {.name = "fetched ahead", .options = {true, true}},
      {.name = "recompute each", .recompute = full(1)},
      {.name = "recompute all, fetched ahead", .options = {true, true}, .recompute = full(2)},
      {.name = "recompute all, kept", .options = {false, false}, .recompute = full(2)},
      {.name = "selective",
       .recompute = {.method = nn::RecomputeMethod::kSelective, .core_attn = true, .mlp = true}},
      {.name = "reduced once", .options = {true, false, false}},
      {.name = "verified", .verify = true},
  };
  for (const Setting& setting : settings) {
    const Trained one = whole_steps(config, setting, nullptr);
    EXPECT_GT(one.first.num_blocks, 3);
    const bool wide = setting.dtype == at::kDouble;
    for (const int64_t size : {2, 7}) {  // seven: one has no sample
      testing::run_mesh(size, {}, [&](Groups& groups) {
        const Trained mine = sharded_steps(config, setting, groups);
        const std::string what = setting.name + " over " + std::to_string(size);
        EXPECT_NEAR(mine.first.loss.loss, one.first.loss.loss, wide ? 1e-10 : 1e-5) << what;
        EXPECT_NEAR(mine.first.grad_norm / one.first.grad_norm, 1.0, wide ? 1e-10 : 1e-5) << what;
        expect_near(mine.gradients, one.gradients, wide ? 1e-10 : 1e-5, what + " gradient");
        expect_near(mine.changes, one.changes, wide ? 1e-8 : 1e-3, what);
      });
    }
  }
}

// What an open block costs: kept, run again, or copied into its readers. Ranks then go through
// passes of their own number and order.
TEST(Fsdp, EveryCarryPolicyEqualsOneProcess) {
  Config config = small_blocks();
  config.actor.ppo_max_token_len_per_gpu = 16;
  for (const char* carry : {"retain", "recompute", "replay"}) {
    config.sharing.carry = carry;
    const Setting setting{.name = carry, .dtype = at::kDouble, .options = {false, true}};
    const Trained one = whole_steps(config, setting, nullptr);
    EXPECT_GT(one.first.num_blocks, 4) << carry;
    testing::run_mesh(3, {}, [&](Groups& groups) {
      const Trained mine = sharded_steps(config, setting, groups);
      EXPECT_NEAR(mine.first.loss.loss, one.first.loss.loss, 1e-10) << carry;
      expect_near(mine.gradients, one.gradients, 1e-10, std::string(carry) + " gradient");
      expect_near(mine.changes, one.changes, 1e-8, carry);
    });
  }
}

// Losses of routers take the counts of all ranks before the first backward of any.
TEST(Fsdp, ExpertsAndTheirLossesEqualOneProcess) {
  Config config = small_blocks();
  config.actor.router = {
      .moe_aux_loss_coeff = 0.1, .moe_z_loss_coeff = 0.02, .moe_router_dtype = {}};
  const Setting setting{.name = "experts", .dtype = at::kDouble, .experts = true};
  const Trained one = whole_steps(config, setting, nullptr);
  for (const int64_t size : {2, 7}) {  // seven: one has no sample
    testing::run_mesh(size, {}, [&](Groups& groups) {
      const Trained mine = sharded_steps(config, setting, groups);
      EXPECT_NEAR(mine.first.routers->loss, one.first.routers->loss, 1e-10);
      EXPECT_NEAR(mine.first.grad_norm / one.first.grad_norm, 1.0, 1e-10);
      expect_near(mine.gradients, one.gradients, 1e-10, "gradient");
      expect_near(mine.changes, one.changes, 1e-6, "changes");
    });
  }
}

TEST(Fsdp, HybridShardingEqualsOneProcess) {
  const Config config = small_blocks();
  for (const bool ahead : {false, true}) {
    const Setting setting{
        .name = "2 x 2", .dtype = at::kDouble, .options = {.forward_prefetch = ahead}};
    const Trained one = whole_steps(config, setting, nullptr);
    testing::run_mesh(4, {.shard = 2}, [&](Groups& groups) {
      const Trained mine = sharded_steps(config, setting, groups);
      EXPECT_NEAR(mine.first.grad_norm / one.first.grad_norm, 1.0, 1e-10);
      expect_near(mine.gradients, one.gradients, 1e-10, "gradient");
      expect_near(mine.changes, one.changes, 1e-8, "changes");
    });
  }
}

// Who holds a number makes no difference to it: one block per rank, or sums at the end of a step.
TEST(Fsdp, HasTheBitsOfZero1) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Config blocks = small_blocks();
    Config one_block = blocks;
    one_block.actor.ppo_max_token_len_per_gpu = 16384;
    const std::vector<std::pair<Config, Setting>> cases = {
        {one_block, {.name = "one block", .dtype = dtype}},
        {one_block, {.name = "one block, fetched ahead", .dtype = dtype, .options = {true, true}}},
        {blocks, {.name = "once", .dtype = dtype, .options = {true, false, false}}},
        {blocks, {.name = "once, kept", .dtype = dtype, .options = {false, true, false}}},
    };
    for (const auto& [config, setting] : cases) {
      testing::run_mesh(3, {}, [&](Groups& groups) {
        const Trained zero1 = whole_steps(config, setting, &groups.data);
        const Trained mine = sharded_steps(config, setting, groups);
        expect_equal(mine.gradients, zero1.gradients, setting.name + " gradient");
        expect_equal(mine.changes, zero1.changes, setting.name);
      });
    }
  }
}

TEST(Fsdp, TwoRunsHaveTheSameBits) {
  const Config config = small_blocks();
  const Setting setting{.name = "twice", .options = {true, true}, .recompute = full(1)};
  std::vector<std::vector<at::Tensor>> changes;
  std::mutex mutex;
  for (int run = 0; run < 2; ++run) {
    testing::run_mesh(3, {}, [&](Groups& groups) {
      Trained mine = sharded_steps(config, setting, groups);
      const std::lock_guard lock(mutex);
      changes.push_back(std::move(mine.changes));
    });
  }
  for (const auto& other : changes) expect_equal(other, changes[0], "run");
}

}  // namespace banyan::train
