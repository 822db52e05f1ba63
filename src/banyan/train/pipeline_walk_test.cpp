// Pipeline parallel: walks of any tries, scores and a critic over stages give what one process
// gives; what a stage sends and keeps is what the formulas say. The ranks are threads here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "banyan/parallel/weight_view.h"
#include "banyan/testing/random_trie.h"
#include "banyan/testing/staged_steps.h"
#include "banyan/testing/walk_run.h"
#include "banyan/train/critic.h"
#include "banyan/train/spread.h"

namespace banyan::train {

using banyan::testing::all_of;
using banyan::testing::expect_near;
using banyan::testing::Named;
using banyan::testing::relative;
using namespace banyan::testing::staged;
using parallel::Groups;

// Forks, duplicates and prefixes of any depth, cut anywhere, under both ways to carry.
TEST(PipelineRanks, WalksOfRandomTries) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    const std::vector<Sample> samples =
        testing::random_samples({.seed = seed,
                                 .vocab = testing::kVocab,
                                 .depth = static_cast<int32_t>(seed % 5),
                                 .max_fan_out = 4,
                                 .max_samples = 16,
                                 .scored = 0.8});
    trie::PlanOptions options;
    options.max_tokens_per_block = 10 + static_cast<int64_t>(seed);
    options.carry = seed % 2 == 0 ? trie::Carry::kRetain : trie::Carry::kRecompute;
    const trie::Plan plan = trie::plan(samples, options);
    const LossScope scope = seed % 3 == 0 ? LossScope::kMiniBatch : LossScope::kSample;
    const testing::Outcome one =
        testing::run(*testing::model_of(seed % 5, testing::kFp64), plan, scope);
    testing::run_mesh(2, {.pp = 2}, [&](Groups& groups) {
      at::set_num_threads(1);
      models::LoadOptions load{testing::kFp64, true};
      set_stages({.pipeline_model_parallel_size = 2}, groups, load);
      const auto model =
          models::random_model(models::tiny_configs()[seed % 5].second, /*seed=*/7, load);
      const testing::Outcome mine = testing::run(*model, plan, scope);
      model->params().finish_grads();
      EXPECT_NEAR(mine.loss, one.loss, 1e-10 * std::max(1.0, std::abs(one.loss))) << seed;
      EXPECT_EQ(mine.num_calls, one.num_calls) << seed;
      for (const auto& [sample, value] : one.value) {
        EXPECT_TRUE(mine.value.at(sample).allclose(value, 1e-10, 1e-12)) << seed;
      }
      for (const Param& param : model->params().params()) {
        EXPECT_LE(relative(param.grad, one.gradients.at(param.name)), 1e-10)
            << param.name << " seed " << seed;
      }
    });
  }
}

TEST(PipelineRanks, ScoresAreThoseOfOneProcess) {
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    const Case with{.model = tied(), .dtype = dtype};
    const Batch batch = testing::batch_with_values();
    const HeadSpec head{.temperature = 0.7, .with_entropy = true, .with_sum_squares = true};
    trie::PlanOptions options;
    options.max_tokens_per_block = 24;
    options.for_backward = false;
    const auto scores = [&](const Case& of, Groups& groups) {
      at::set_num_threads(1);
      const auto model = models::random_model(of.model, 3, load_options(of, groups));
      Layout layout{true, {}};
      layout.ranks = &groups.data;
      return score_batch_over(batch, *model, options, head, "test", layout);
    };
    Groups one_process;
    const BatchScores one = scores(with, one_process);
    for (const int64_t chunks : {1, 2}) {
      const Case staged = with_stages(with, 2, chunks);
      testing::run_mesh(2, mesh_of(staged), [&](Groups& groups) {
        const BatchScores mine = scores(staged, groups);
        for (size_t i = 0; i < one.value.size(); ++i) {  // the bits do not depend on who computes
          EXPECT_TRUE(mine.value[i].equal(one.value[i])) << i;
          EXPECT_TRUE(mine.entropy[i].equal(one.entropy[i])) << i;
          EXPECT_TRUE(mine.sum_squares[i].equal(one.sum_squares[i])) << i;
        }
      });
    }
  }
}

TEST(PipelineRanks, ACriticEqualsOneProcess) {
  const Batch batch = testing::batch_with_values();
  const auto gradients = [&](const Case& with, Groups& groups) {
    at::set_num_threads(1);
    models::LoadOptions options = load_options(with, groups);
    options.head = models::HeadKind::kValue;
    const auto model = models::random_model(with.model, 5, options);
    Layout layout{true, {}};
    layout.ranks = &groups.data;
    const CriticUpdate update = accumulate_value_gradients(
        small_blocks(with), batch, all_of(batch).samples, layout, *model);
    EXPECT_GT(update.num_tokens, 0.0);
    EXPECT_NE(update.loss, 0.0);
    return testing::whole_gradients(*model, parallel::WeightView(model->params(), groups));
  };
  const Case with{.model = tied()};
  Groups one_process;
  const Named one = gradients(with, one_process);
  const Case staged = with_stages(with, 2);
  testing::run_mesh(2, mesh_of(staged), [&](Groups& groups) {
    expect_near(gradients(staged, groups), one, 1e-10, "critic");
  });
}

// By the formulas of docs/guides/scale_out.md.
TEST(PipelineRanks, BytesSentAreThoseOfTheFormulas) {
  for (const auto& [ranks, chunks] : {std::pair<int64_t, int64_t>{2, 1}, {4, 1}, {2, 2}}) {
    const Case with = with_stages({.model = untied()}, ranks, chunks);
    const Config config = small_blocks(with);
    const Batch batch = testing::batch_with_values();
    testing::run_mesh(ranks, mesh_of(with), [&](Groups& groups) {
      at::set_num_threads(1);
      const auto model = models::random_model(with.model, 3, load_options(with, groups));
      Layout layout{true, {}};
      layout.ranks = &groups.data;
      const UpdateResult result =
          accumulate_gradients(config, batch, all_of(batch), layout, *model);
      ASSERT_GT(result.num_blocks, 3);
      const trie::Plan plan =
          trie::plan(samples_of(batch, all_of(batch).samples),
                     plan_options(config.sharing, layout, block_limits(config.actor), true));
      int64_t numbers = 0;  // of the heads
      for (const trie::Block& block : plan.blocks) {
        numbers += static_cast<int64_t>(block.edges.token.size() + block.edges.source.size());
      }
      constexpr int64_t kHidden = 32, kBytes = 8;
      const int64_t rank = groups.pipeline.rank();
      const int64_t last = ranks - 1;
      // Stages that send on, and stages that send back.
      const int64_t sends = chunks - (rank == last ? 1 : 0) + chunks - (rank == 0 ? 1 : 0);
      const auto& traffic = groups.pipeline.traffic();
      EXPECT_EQ(traffic.at("send").bytes, sends * result.computed_tokens * kHidden * kBytes);
      EXPECT_EQ(traffic.at("send").calls, sends * result.num_blocks);
      EXPECT_EQ(traffic.at("broadcast").bytes, rank == last ? numbers * 8 : 0);
      EXPECT_EQ(traffic.at("all_gather").bytes, (ranks - 1) * (8 + 3 * 8));
      const auto most = static_cast<double>(result.walk.peak_activation_bytes);
      for (const double peak : groups.pipeline.all_gather_number(most)) EXPECT_EQ(peak, most);
    });
  }
}

// What a stage keeps of a block is what nn/activation_bytes.h says of its layers; embedding and
// head keep their part on their stages, and the stages together what one process keeps.
TEST(PipelineRanks, AStageKeepsTheActivationsOfItsLayers) {
  const std::vector<Sample> samples = testing::samples_from({{1, 2, 3, 4, 5, 6, 7, 8}});
  const trie::Plan plan = trie::plan(samples, {});
  for (const int64_t chunks : {1, 2}) {
    const Case with = with_stages({.model = tied()}, 2, chunks);
    std::vector<int64_t> kept(2, 0);
    testing::run_mesh(2, mesh_of(with), [&](Groups& groups) {
      at::set_num_threads(1);
      const auto model = models::random_model(with.model, 3, load_options(with, groups));
      const testing::Outcome mine = testing::run(*model, plan);
      const int64_t rank = groups.pipeline.rank();
      kept[rank] = model->activation_bytes().kept;
      const int64_t rows = rank == 1 ? 7 * 32 * 8 : 0;  // [R, E] of the head
      EXPECT_EQ(mine.stats.peak_activation_bytes, 8 * kept[rank] + rows) << rank;
      EXPECT_EQ(mine.stats.peak_live_tokens, 8) << rank;
    });
    Groups one_process;
    const auto whole = models::random_model(
        with.model, 3, load_options(with_stages({.model = tied()}, 1), one_process));
    const int64_t more_positions = 4 * (2 * chunks - 1);  // one list a stage
    EXPECT_EQ(kept[0] + kept[1], whole->activation_bytes().kept + more_positions);
  }
}

TEST(PipelineRanks, SplitsThatDoNotFitTheModelAreRefusedByName) {
  const auto refusal = [](const Case& with) {
    std::string text;
    std::mutex mutex;
    testing::run_mesh(with.split.pipeline_model_parallel_size, mesh_of(with), [&](Groups& groups) {
      try {
        models::random_model(with.model, 1, load_options(with, groups));
      } catch (const std::invalid_argument& error) {
        const std::lock_guard lock(mutex);
        text = error.what();
      }
    });
    return text;
  };
  EXPECT_NE(
      refusal(with_stages({.model = tied()}, 3))
          .find("[config] actor_rollout_ref.actor.megatron.pipeline_model_parallel_size: wanted "
                "layers that divide: 4 of 4"),
      std::string::npos);
}

}  // namespace banyan::train
