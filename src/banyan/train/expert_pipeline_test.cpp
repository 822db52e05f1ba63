// Experts dealt out over ranks in a pipeline: each stage's over those of several pipelines, which
// go in step. What they give is what one process gives. The ranks are threads here;
// tests/distributed runs the same over processes.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "banyan/testing/expert_steps.h"
#include "banyan/testing/random_trie.h"
#include "banyan/testing/walk_run.h"

namespace banyan::train {
namespace {

using banyan::testing::relative;
using banyan::testing::experts::Case;
using banyan::testing::experts::expect_equals_one;
using banyan::testing::experts::four_layers;
using banyan::testing::experts::three_steps;
using parallel::Groups;
using parallel::MeshShape;

// Each stage's experts over ranks of pipelines of their own, which go in step: whatever their
// numbers of blocks, and where the backward of a trunk waits for its branches.
TEST(ExpertPipeline, DealtOutInAPipelineEqualOneProcess) {
  for (const std::string carry : {"retain", "recompute", "dense"}) {
    const Case with{.model = four_layers(),
                    .share = carry != "dense",
                    .with_losses = carry == "retain",
                    .carry = carry != "dense" ? carry : "auto"};
    expect_equals_one(with, {.ep = 2, .pp = 2}, 4, "ep 2 pp 2 " + carry);
    Case interleaved = with;
    interleaved.chunks = 2;
    expect_equals_one(interleaved, {.ep = 2, .pp = 2}, 4, "ep 2 pp 2 x 2 " + carry);
  }
}

TEST(ExpertPipeline, OfAPipelineWithoutSamplesOrWithRecomputeStayInStep) {
  const Case with{.model = four_layers(), .with_losses = true};
  Case few = with;
  few.num_samples = 3;
  expect_equals_one(few, {.ep = 2, .pp = 2}, 4, "one group");
  few.chunks = 2;
  expect_equals_one(few, {.ep = 2, .pp = 2}, 4, "one group, interleaved");
  Case again = with;
  again.recompute = {.method = nn::RecomputeMethod::kUniform, .num_layers = 2};
  again.carry = "recompute";
  expect_equals_one(again, {.ep = 2, .pp = 2}, 4, "uniform 2");
  Case whole = with;
  whole.loss_mode = "kl_cov";
  expect_equals_one(whole, {.ep = 2, .pp = 2}, 4, "kl_cov");
  Case single = with;
  single.dtype = at::kFloat;
  single.chunks = 2;
  expect_equals_one(single, {.ep = 2, .pp = 2}, 4, "fp32");
}

TEST(ExpertPipeline, OfAPipelineBesideContextAndTensorParallelEqualOneProcess) {
  for (const bool by_heads : {false, true}) {
    const Case with{.model = four_layers(), .with_losses = true, .by_heads = by_heads};
    expect_equals_one(with, {.cp = 2, .ep = 2, .pp = 2}, 4, "cp 2 ep 2 pp 2");
  }
  for (const bool sequence : {false, true}) {
    const Case with{.model = four_layers(), .with_losses = true, .sequence = sequence};
    const MeshShape mesh{.tp = 2, .ep = 2, .pp = 2, .etp = 2};
    expect_equals_one(with, mesh, 8, sequence ? "tp 2 pp 2 ep 2 sequence" : "tp 2 pp 2 ep 2");
  }
}

TEST(ExpertPipeline, TwoRunsHaveTheSameBits) {
  const Case with{.model = four_layers(), .dtype = at::kFloat, .with_losses = true};
  std::map<std::string, at::Tensor> first[4];
  for (int run = 0; run < 2; ++run) {
    testing::run_mesh(4, {.ep = 2, .pp = 2}, [&](Groups& groups) {
      at::set_num_threads(1);
      auto mine = three_steps(with, groups).changes;
      auto& kept = first[groups.world.rank()];
      if (run == 0) kept = std::move(mine);
      if (run == 0) return;
      for (const auto& [name, tensor] : kept) EXPECT_TRUE(tensor.equal(mine.at(name))) << name;
    });
  }
}

// Each pipeline walks a random trie of its own under a plan of its own, of any number of blocks.
TEST(ExpertPipeline, WalksOfRandomTries) {
  std::string config = models::tiny_moe_config();
  config.replace(config.find("num_hidden_layers\": 2"), 21, "num_hidden_layers\": 4");
  for (uint64_t seed = 0; seed < 8; ++seed) {
    const auto plan_of = [&](uint64_t which) {
      if (seed == 3 && which == 1) return trie::plan({}, {});
      const std::vector<Sample> samples =
          testing::random_samples({.seed = 2 * seed + which,
                                   .vocab = testing::kVocab,
                                   .depth = static_cast<int32_t>((seed + which) % 5),
                                   .max_fan_out = 4,
                                   .max_samples = 12,
                                   .scored = 0.8});
      trie::PlanOptions options;
      options.max_tokens_per_block = 10 + static_cast<int64_t>(7 * which + seed);
      options.carry = (seed + which) % 2 == 0 ? trie::Carry::kRetain : trie::Carry::kRecompute;
      return trie::plan(samples, options);
    };
    const LossScope scope = seed % 3 == 0 ? LossScope::kMiniBatch : LossScope::kSample;
    const std::vector<trie::Plan> plans = {plan_of(0), plan_of(1)};
    std::vector<testing::Outcome> one;
    for (const trie::Plan& plan : plans) {
      one.push_back(testing::run(
          *models::random_model(config, /*seed=*/7, {testing::kFp64, true}), plan, scope));
    }
    testing::run_mesh(4, {.ep = 2, .pp = 2}, [&](Groups& groups) {
      at::set_num_threads(1);
      models::LoadOptions load{testing::kFp64, true};
      load.experts = &groups.expert;
      set_stages({.pipeline_model_parallel_size = 2,
                  .virtual_pipeline_model_parallel_size = 1 + static_cast<int64_t>(seed % 2)},
                 groups,
                 load);
      const auto model = models::random_model(config, /*seed=*/7, load);
      const auto which = static_cast<size_t>(groups.expert.rank());
      const testing::Outcome mine = testing::run(*model, plans[which], scope);
      EXPECT_NEAR(mine.loss, one[which].loss, 1e-10 * std::max(1.0, std::abs(one[which].loss)))
          << seed;
      EXPECT_EQ(mine.num_calls, one[which].num_calls) << seed;
      for (const auto& [sample, value] : one[which].value) {
        EXPECT_TRUE(mine.value.at(sample).allclose(value, 1e-10, 1e-12)) << seed;
      }
      for (const Param& param : model->params().params()) {
        at::Tensor wanted = one[which].gradients.at(param.name);
        if (param.is_dealt) wanted = wanted.add(one[1 - which].gradients.at(param.name));
        EXPECT_LE(relative(param.grad, wanted), 1e-10) << param.name << " seed " << seed;
      }
    });
  }
}

}  // namespace
}  // namespace banyan::train
