// Fully sharded training: what a rank sends and holds, how a failing rank ends the others, scores,
// and how the weights get to a whole model. The ranks are threads here.
#include <gtest/gtest.h>

#include <memory>
#include <mutex>

#include "banyan/core/error.h"
#include "banyan/testing/sharded_steps.h"
#include "banyan/train/passes.h"
#include "banyan/train/spread.h"

namespace banyan::train {

using namespace banyan::testing::sharded;
using parallel::Collectives;
using parallel::Fsdp;
using parallel::FsdpOptions;
using parallel::Groups;
using testing::all_of;
using testing::batch_of_five;
using testing::relative;
using testing::small_blocks;

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
