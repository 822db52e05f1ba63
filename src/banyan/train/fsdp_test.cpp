// Fully sharded training: what ranks that hold a part of the weights each compute is what one
// process computes. The ranks are threads; tests/distributed runs the same over processes.
#include "banyan/parallel/fsdp.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>

#include "banyan/core/error.h"
#include "banyan/testing/five_groups.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/passes.h"
#include "banyan/train/spread.h"
#include "banyan/train/update.h"

namespace banyan::train {
namespace {

using parallel::Collectives;
using parallel::Fsdp;
using parallel::FsdpOptions;
using parallel::Groups;
using testing::all_of;
using testing::batch_of_five;
using testing::expect_near;
using testing::relative;
using testing::small_blocks;

constexpr int64_t kLayers = 2;  // of the tiny model

struct Setting {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  bool share = true;
  FsdpOptions options = {};
  nn::Recompute recompute = {};
  int64_t steps = 3;
  bool verify = false;
  bool experts = false;
};

struct Trained {
  UpdateResult first;
  std::vector<at::Tensor> gradients;  // of the first update
  std::vector<at::Tensor> changes;
  std::map<std::string, parallel::Traffic> shard, replica;
  int64_t num_gathers = 0;  // of the first update
};

std::unique_ptr<models::CausalLM> fresh(at::ScalarType dtype,
                                        const nn::Recompute& recompute,
                                        bool experts = false) {
  const std::string config =
      experts ? testing::tiny_moe_config_json() : testing::tiny_config_json();
  auto model = models::random_model(config, 3, {{.dtype = dtype}, true});
  model->set_recompute(recompute);
  return model;
}

// ZeRO-1 over `ranks`, or one process.
Trained whole_steps(const Config& config, const Setting& setting, Collectives* ranks) {
  const auto model = fresh(setting.dtype, setting.recompute, setting.experts);
  optim::AdamW optimizer(model->params(), adamw_options(config.actor.optim), ranks);
  const Batch batch = batch_of_five();
  Layout layout{setting.share, {}};
  layout.ranks = ranks;
  std::vector<at::Tensor> before;
  for (const Param& param : model->params().params()) before.push_back(param.master.clone());
  Trained out;
  for (int step = 0; step < setting.steps; ++step) {
    if (step == 0) {
      out.first = accumulate_gradients(config, batch, all_of(batch), layout, *model);
      for (const Param& param : model->params().params()) {
        out.gradients.push_back(param.grad.clone());
      }
    }
    UpdateResult result =
        update(config, batch, all_of(batch), layout, false, 1e-3, *model, optimizer);
    if (step == 0) out.first.grad_norm = result.grad_norm;
  }
  for (size_t i = 0; i < before.size(); ++i) {
    out.changes.push_back(model->params().params()[i].master.sub(before[i]));
  }
  return out;
}

Trained sharded_steps(const Config& config, const Setting& setting, Groups& groups) {
  const auto model = fresh(setting.dtype, setting.recompute, setting.experts);
  std::vector<at::Tensor> before;
  for (const Param& param : model->params().params()) before.push_back(param.master.clone());
  FsdpOptions options = setting.options;
  options.compute = setting.dtype;
  Fsdp fsdp(
      model->params(), {&groups.data, &groups.shard, &groups.replica}, options, [&](Pass pass) {
        return model->unit_uses(pass);
      });
  optim::AdamW optimizer(fsdp.parts(), adamw_options(config.actor.optim));
  optimizer.norm_over(&groups.shard);
  const Batch batch = batch_of_five();
  Layout layout{setting.share, {}};
  layout.ranks = &groups.data;
  const at::ScalarType wide = setting.dtype == at::kDouble ? at::kDouble : at::kFloat;
  Trained out;
  for (int step = 0; step < setting.steps; ++step) {
    UpdateResult result = update(
        config, batch, all_of(batch), layout, setting.verify && step == 1, 1e-3, *model, optimizer);
    if (step > 0) continue;
    out.first = std::move(result);
    out.shard = groups.shard.traffic();
    out.replica = groups.replica.traffic();
    out.num_gathers = fsdp.num_gathers();
    std::vector<at::Tensor> pieces;
    for (const Param& part : fsdp.parts().params()) pieces.push_back(part.grad);
    fsdp.each_of(pieces, wide, [&](const Param& /*param*/, const at::Tensor& whole) {
      out.gradients.push_back(whole.clone());
    });
  }
  std::map<std::string, at::Tensor> weights;
  fsdp.each(wide, [&](const Param& param, const at::Tensor& whole) {
    weights[param.name] = whole.clone();
  });
  // each() goes unit by unit; lists are in the order of the table.
  std::vector<at::Tensor> by_unit = std::move(out.gradients);
  out.gradients.assign(before.size(), {});
  size_t next = 0;
  const std::vector<Param>& params = model->params().params();
  for (int64_t unit = 0; unit < model->params().num_units(); ++unit) {
    for (size_t i = 0; i < params.size(); ++i) {
      if (params[i].unit == unit) out.gradients[i] = by_unit[next++];
    }
  }
  for (size_t i = 0; i < before.size(); ++i) {
    out.changes.push_back(weights.at(params[i].name).sub(before[i]));
  }
  return out;
}

void expect_equal(const std::vector<at::Tensor>& a,
                  const std::vector<at::Tensor>& b,
                  const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << what << " " << i;
}

nn::Recompute full(int64_t num_layers) {
  return {.method = nn::RecomputeMethod::kUniform, .num_layers = num_layers};
}

// Numbers that a rank holds of each unit: the root and each layer.
std::vector<int64_t> pieces(int64_t size) {
  const auto model = fresh(at::kFloat, {});
  std::vector<int64_t> out(model->params().num_units(), 0);
  for (const Param& param : model->params().params()) out[param.unit] += param.master.numel();
  for (int64_t& piece : out) piece = (piece + size - 1) / size;
  return out;
}

int64_t sum(const std::vector<int64_t>& values) {
  int64_t total = 0;
  for (const int64_t value : values) total += value;
  return total;
}

}  // namespace

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

// The formulas of parallel/fsdp.h.
TEST(Fsdp, SendsTheBytesOfTheFormula) {
  Config config = small_blocks();
  config.actor.ppo_max_token_len_per_gpu = 16384;  // one forward and one backward
  const std::vector<int64_t> p = pieces(2);
  const int64_t once = sum(p);
  struct Case {
    Setting setting;
    int64_t gathered;
  };
  const std::vector<Case> cases = {
      {{.name = "resharded", .dtype = at::kBFloat16, .steps = 1}, 2 * once * 2},
      {{.name = "fp32", .steps = 1}, 2 * once * 4},
      {{.name = "kept", .dtype = at::kBFloat16, .options = {false}, .steps = 1}, once * 2},
      {{.name = "recompute", .dtype = at::kBFloat16, .recompute = full(1), .steps = 1},
       2 * once * 2},
      {{.name = "recompute all", .dtype = at::kBFloat16, .recompute = full(kLayers), .steps = 1},
       2 * once * 2 + p[1] * 2},
  };
  for (const Case& each : cases) {
    testing::run_mesh(2, {}, [&](Groups& groups) {
      Trained mine = sharded_steps(config, each.setting, groups);
      mine.shard["all_gather"].bytes -= 8;  // the sum of squares of the norm
      EXPECT_EQ(mine.shard["all_gather"].bytes, each.gathered) << each.setting.name;
      EXPECT_EQ(mine.shard["all_to_all"].bytes, once * 4) << each.setting.name;
    });
  }
  // Four ranks: equal pieces are summed over two replicas.
  testing::run_mesh(4, {.shard = 2}, [&](Groups& groups) {
    Trained mine = sharded_steps(config, {.name = "2 x 2", .steps = 1}, groups);
    EXPECT_EQ(mine.shard["all_to_all"].bytes, once * 4);
    int64_t halves = 0;
    for (const int64_t piece : p) halves += (piece + 1) / 2;
    EXPECT_EQ(mine.replica["all_to_all"].bytes, halves * 4);
    EXPECT_EQ(mine.replica["all_gather"].bytes, halves * 4);
  });
}

// Masters, gradients and moments between two steps, and no whole weights or gradients beside them.
TEST(Fsdp, ARankHoldsItsPart) {
  const int64_t size = 4;
  testing::run_ranks(size, [&](Collectives& all) {
    const auto model = fresh(at::kBFloat16, {});
    const int64_t num_elements = model->params().num_elements();
    Collectives alone;
    Fsdp fsdp(model->params(), {&all, &all, &alone}, {.compute = at::kBFloat16}, [&](Pass pass) {
      return model->unit_uses(pass);
    });
    optim::AdamW optimizer(fsdp.parts(), {});
    optimizer.norm_over(&all);
    Layout layout{true, {}};
    layout.ranks = &all;
    const Config config = small_blocks();
    const Batch batch = batch_of_five();
    update(config, batch, all_of(batch), layout, false, 1e-3, *model, optimizer);
    size_t bytes = 0;
    for (const auto* storage : fsdp.parts().master_storages()) bytes += storage->nbytes();
    for (const auto* storage : fsdp.parts().grad_storages()) bytes += storage->nbytes();
    for (const at::Tensor& moment : optimizer.held_moments()) bytes += moment.storage().nbytes();
    const auto wanted = static_cast<size_t>(16 * num_elements / size);
    EXPECT_GE(bytes, wanted);
    EXPECT_LE(bytes, wanted + 16 * (kLayers + 1));  // padding of each unit
    for (const auto* storage : model->params().master_storages()) EXPECT_EQ(storage->nbytes(), 0U);
    for (const auto* storage : model->params().grad_storages()) EXPECT_EQ(storage->nbytes(), 0U);
    EXPECT_TRUE(model->params().form_storages().empty());
  });
}

// A rank that fails between two passes ends the others, threads and all.
TEST(Fsdp, ARankThatFailsEndsTheOthers) {
  const Config config = small_blocks();
  const trie::Plan plan = trie::plan(
      samples_of(batch_of_five(), {0, 4, 8}),
      plan_options(config.sharing, {true, {}}, block_limits(config.actor), /*for_backward=*/true));
  const auto run = [&] {
    testing::run_mesh(2, {}, [&](Groups& groups) {
      const auto model = fresh(at::kFloat, {});
      Fsdp fsdp(model->params(),
                {&groups.data, &groups.shard, &groups.replica},
                {.forward_prefetch = true},
                [&](Pass pass) { return model->unit_uses(pass); });
      walk(*model,
           plan,
           {},
           LossScope::kSample,
           [&](const std::vector<int32_t>&, const TokenOutputs& outputs) {
             BANYAN_CHECK(groups.data.rank() == 0, "[loss] rank 1 fails");
             return TokenGradients{outputs.value, {}};
           });
    });
  };
  EXPECT_THROW(run(), std::exception);
}

TEST(Fsdp, ScoresEqualOneProcess) {
  const Config config = small_blocks();
  const Batch batch = batch_of_five();
  const trie::PlanOptions options =
      plan_options(config.sharing, {true, {}}, block_limits(config.actor), /*for_backward=*/false);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto one = fresh(dtype, {});
    const BatchScores wanted =
        score_batch(batch, *one, options, {.with_entropy = true}, "old_log_prob", {});
    testing::run_ranks(7, [&](Collectives& all) {
      const auto model = fresh(dtype, {});
      Collectives alone;
      Fsdp fsdp(model->params(),
                {&all, &all, &alone},
                {.forward_prefetch = true, .with_gradients = false, .compute = dtype},
                [&](Pass pass) { return model->unit_uses(pass); });
      Layout layout{true, {}};
      layout.ranks = &all;
      const BatchScores got =
          score_batch_over(batch, *model, options, {.with_entropy = true}, "old_log_prob", layout);
      for (size_t i = 0; i < wanted.value.size(); ++i) {
        // Rows of the native kernels have the same bits in every batch.
        if (dtype == at::kBFloat16) {
          EXPECT_TRUE(got.value[i].equal(wanted.value[i])) << i;
        } else {
          EXPECT_LE(relative(got.value[i], wanted.value[i]), 1e-5) << i;
        }
      }
    });
  }
}

// What generates has whole weights: those of the parts, in its own form.
TEST(Fsdp, HandsOverTheWeightsToAWholeModel) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto one = fresh(dtype, {});
    const std::vector<Sample> samples = samples_of(batch_of_five(), {0, 4, 8});
    const trie::Plan plan = trie::plan(samples, {});
    const SampleScores wanted = score_samples(*one, plan, {});
    testing::run_ranks(2, [&](Collectives& all) {
      const auto model = fresh(dtype, {});
      const auto whole = models::random_model(
          testing::tiny_config_json(), 4, {{.dtype = dtype}, /*with_backward=*/false});
      Collectives alone;
      Fsdp fsdp(model->params(), {&all, &all, &alone}, {.compute = dtype}, [&](Pass pass) {
        return model->unit_uses(pass);
      });
      std::vector<parallel::UnitWeights> units;
      for (int64_t u = 0; u < whole->params().num_units(); ++u) {
        units.emplace_back(whole->params(), u);
      }
      fsdp.hand_over(units);
      const SampleScores got = score_samples(*whole, plan, {});
      for (size_t i = 0; i < wanted.value.size(); ++i) {
        EXPECT_TRUE(got.value[i].equal(wanted.value[i])) << i;
      }
    });
  }
}

}  // namespace banyan::train
