// Pipeline parallel: ranks that hold different layers give what one process gives. The ranks are
// threads here; tests/distributed runs the same over processes.
#include <gtest/gtest.h>

#include <mutex>
#include <utility>
#include <vector>

#include "banyan/testing/staged_steps.h"

namespace banyan::train {

using banyan::testing::Named;
using banyan::testing::Trained;
using namespace banyan::testing::staged;
using parallel::Groups;

TEST(PipelineRanks, UpdatesEqualOneProcess) {
  for (const auto& [name, model] : {std::pair{"untied", untied()}, {"tied", tied()}}) {
    for (const std::string carry : {"retain", "recompute", "dense"}) {
      const Case with{
          .model = model, .share = carry != "dense", .carry = carry != "dense" ? carry : "auto"};
      const Trained one = alone(with);
      EXPECT_GT(one.first.num_blocks, 3);
      EXPECT_EQ(one.first.walk.num_recomputed > 0, carry == "recompute");
      for (const int64_t ranks : {2, 4}) {
        const Case staged = with_stages(with, ranks);
        const std::string what = name + (" " + carry) + ", stages " + std::to_string(ranks);
        expect_equals_one(staged, mesh_of(staged), ranks, one, what);
      }
    }
  }
}

TEST(PipelineRanks, InterleavedStagesToo) {
  for (const std::string carry : {"retain", "recompute", "dense"}) {
    const Case with{.model = carry == "retain" ? untied() : tied(),
                    .share = carry != "dense",
                    .carry = carry != "dense" ? carry : "auto"};
    const Trained one = alone(with);
    const Case staged = with_stages(with, 2, 2);
    expect_equals_one(staged, mesh_of(staged), 2, one, carry + ", 2 x 2");
  }
}

// The losses of a layer's routers are over the tokens of the mini-batch, told before the backward.
TEST(PipelineRanks, ModelsWithExperts) {
  for (const std::string carry : {"retain", "recompute"}) {
    const Case with{.model = experts(), .carry = carry};
    const Trained one = alone(with);
    ASSERT_TRUE(one.first.routers);
    EXPECT_GT(one.first.routers->loss, 0.0);
    if (carry == "retain") {
      Case staged = with_stages(with, 2);
      expect_equals_one(staged, mesh_of(staged), 2, one, "experts");
      staged.recompute = {.method = nn::RecomputeMethod::kUniform, .num_layers = 2};
      expect_equals_one(staged, mesh_of(staged, 2), 4, one, "experts, TP2 PP2");
    } else {
      const Case staged = with_stages(with, 2, 2);
      expect_equals_one(staged, mesh_of(staged), 4, one, "experts, 2 x 2, DP2");
    }
  }
}

// The embedding or the head alone on a stage, and stages of other sizes.
TEST(PipelineRanks, UnevenStages) {
  const Case with{.model = tied()};
  const Trained one = alone(with);
  Case counted = with_stages(with, 3);
  counted.split.account_for_embedding_in_pipeline_split = true;
  counted.split.account_for_loss_in_pipeline_split = true;
  expect_equals_one(counted, mesh_of(counted), 3, one, "counted");
  Case first = with_stages(with, 2);
  first.split.num_layers_in_first_pipeline_stage = 1;
  expect_equals_one(first, mesh_of(first), 2, one, "one layer first");
}

TEST(PipelineRanks, StagesWithoutALayer) {
  Case with{.model = tied()};
  with.model.replace(with.model.find("num_hidden_layers\": 4"), 21, "num_hidden_layers\": 1");
  const Trained one = alone(with);
  Case counted = with_stages(with, 3);
  counted.split.account_for_embedding_in_pipeline_split = true;
  counted.split.account_for_loss_in_pipeline_split = true;
  expect_equals_one(counted, mesh_of(counted), 3, one, "embedding, layer, head");
}

TEST(PipelineRanks, BesideTensorAndDataParallelRanksWithSharedMoments) {
  for (const auto& [name, model] : {std::pair{"untied", untied()}, {"tied", tied()}}) {
    const Case with{.model = model};
    const Trained one = alone(with);
    Case staged = with_stages(with, 2);
    for (const bool sequence : {false, true}) {
      staged.sequence = sequence;
      expect_equals_one(staged, mesh_of(staged, 2), 4, one, name + std::string(" TP2 PP2"));
    }
    for (const bool shard : {false, true}) {
      staged.shard = shard;
      expect_equals_one(staged, mesh_of(staged), 4, one, name + std::string(" PP2 DP2"));
    }
  }
  const Case with{.model = tied(), .dtype = at::kFloat, .shard = true, .sequence = true};
  const Trained one = alone(with);
  const Case staged = with_stages(with, 2);
  expect_equals_one(staged, mesh_of(staged, 2), 8, one, "TP2 PP2 DP2");
}

TEST(PipelineRanks, BesideContextParallelRanks) {
  for (const std::string& model : {tied(), experts()}) {
    const Case with{.model = model};
    const Trained one = alone(with);
    for (const int64_t chunks : {1, 2}) {
      Case staged = with_stages(with, 2, chunks);
      staged.ranges = 2;
      if (chunks == 1) expect_equals_one(staged, mesh_of(staged), 4, one, "CP2 by ranges, PP2");
      staged.recompute = {.method = nn::RecomputeMethod::kUniform, .num_layers = 2};
      expect_equals_one(staged, mesh_of(staged), 4, one, "CP2 by ranges, PP2, recompute");
      staged.recompute = {};
      staged.ranges = 1;
      staged.heads = 2;
      expect_equals_one(staged, mesh_of(staged), 4, one, "CP2 by heads, PP2");
    }
  }
}

TEST(PipelineRanks, WhatABackwardComputesAgainIsTheSame) {
  const Case with{.model = tied()};
  const Trained one = alone(with);
  for (const nn::Recompute& recompute :
       {nn::Recompute{.method = nn::RecomputeMethod::kUniform, .num_layers = 2},
        nn::Recompute{.method = nn::RecomputeMethod::kBlock, .num_layers = 1},
        nn::Recompute{.method = nn::RecomputeMethod::kSelective, .core_attn = true, .mlp = true}}) {
    Case staged = with_stages(with, 2);
    staged.recompute = recompute;
    expect_equals_one(staged, mesh_of(staged), 2, one, "recompute");
  }
}

// Losses that compare all tokens of a mini-batch: scored first.
TEST(PipelineRanks, LossesOfTheWholeMiniBatch) {
  const Case with{.model = untied(), .loss_mode = "kl_cov"};
  const Trained one = alone(with);
  for (const auto& [ranks, size] : {std::pair<int64_t, int64_t>{2, 2}, {2, 4}}) {
    const Case staged = with_stages(with, ranks, ranks == size ? 2 : 1);
    expect_equals_one(staged, mesh_of(staged), size, one, "kl_cov");
  }
}

TEST(PipelineRanks, TwoRunsHaveTheSameBits) {
  std::vector<Named> all;
  std::mutex mutex;
  for (int run = 0; run < 2; ++run) {
    const Case with = with_stages({.model = tied(), .dtype = at::kFloat}, 2, 2);
    testing::run_mesh(2, mesh_of(with), [&](Groups& groups) {
      Trained mine = three_steps(with, groups);
      const std::lock_guard lock(mutex);
      all.push_back(std::move(mine.changes));
    });
  }
  for (size_t i = 1; i < all.size(); ++i) {
    for (const auto& [name, tensor] : all[0]) EXPECT_TRUE(tensor.equal(all[i].at(name))) << name;
  }
}

}  // namespace banyan::train
