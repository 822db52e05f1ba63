// What a profile counts: the FLOPs of a pass are those of its closed form, however the batch is cut
// and whatever computes it, and profiling changes no bit of the result.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "banyan/bench/scaling_bench.h"
#include "banyan/bench/trie_bench.h"
#include "banyan/bench/workload.h"
#include "banyan/core/profile_report.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/probe.h"

namespace banyan::bench {
namespace {

struct Counted {
  int64_t forward = 0;
  int64_t backward = 0;
  int64_t recompute = 0;
};

Counted count(const std::vector<profile::Event>& events) {
  Counted out;
  for (const profile::Row& row : profile::table(events)) {
    if (row.phase == profile::Phase::kForward) out.forward += row.flops;
    if (row.phase == profile::Phase::kBackward) out.backward += row.flops;
    if (row.phase == profile::Phase::kRecompute) out.recompute += row.flops;
  }
  return out;
}

double closed_form(const models::ModelShape& shape, const std::vector<Sample>& samples) {
  const trie::Trie trie = trie::build(samples);
  const auto rows = static_cast<int64_t>(trie::edges_of(trie, samples).source.size());
  return pass_flops(shape, trie.num_tokens(), trie.num_pairs(), rows);
}

class ProfileFlops : public ::testing::TestWithParam<Kernels> {};

TEST_P(ProfileFlops, AreThoseOfTheClosedForm) {
  const auto model = models::random_model(
      testing::tiny_config_json(), 1, {{.dtype = at::kBFloat16, .kernels = GetParam()}, true});
  model->params().ensure_grads();
  const auto vocab = static_cast<int32_t>(model->shape().vocab);
  for (const char* preset : {"P40R9n4", "turns2n2", "tree-b2d2", "alone2"}) {
    const std::vector<Sample> samples = make_workload(preset, vocab, /*seed=*/1);
    for (const trie::Carry carry : {trie::Carry::kRetain, trie::Carry::kRecompute}) {
      trie::PlanOptions options;
      options.carry = carry;
      options.max_samples_per_block = 1;
      const trie::Plan plan = trie::plan(samples, options);
      ASSERT_EQ(plan.num_computed, plan.num_unique) << preset;
      profile::start();
      train::probe_pass(*model, plan);
      const Counted counted = count(profile::stop());
      EXPECT_EQ(static_cast<double>(counted.forward + counted.backward),
                closed_form(model->shape(), samples))
          << preset;
      EXPECT_EQ(counted.backward, 2 * counted.forward) << preset;
      EXPECT_EQ(counted.recompute > 0, plan.num_recomputed > 0) << preset;
    }
  }
}

// What a backward computes again is recomputation, and neither forward nor backward.
TEST_P(ProfileFlops, DoNotGrowWhenActivationsAreComputedAgain) {
  using nn::RecomputeMethod;
  const auto model = models::random_model(
      testing::tiny_config_json(), 1, {{.dtype = at::kBFloat16, .kernels = GetParam()}, true});
  model->params().ensure_grads();
  const auto vocab = static_cast<int32_t>(model->shape().vocab);
  const std::vector<Sample> samples = make_workload("P40R9n4", vocab, /*seed=*/1);
  const trie::Plan plan = trie::plan(samples, {});
  const nn::Recompute ways[] = {
      {.method = RecomputeMethod::kUniform, .num_layers = 2},
      {.method = RecomputeMethod::kBlock, .num_layers = 1},
      {.method = RecomputeMethod::kSelective, .core_attn = true, .mlp = true}};
  for (const nn::Recompute& way : ways) {
    model->set_recompute(way);
    profile::start();
    train::probe_pass(*model, plan);
    const Counted counted = count(profile::stop());
    EXPECT_EQ(static_cast<double>(counted.forward + counted.backward),
              closed_form(model->shape(), samples));
    EXPECT_GT(counted.recompute, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels,
                         ProfileFlops,
                         ::testing::Values(Kernels::kNative, Kernels::kAten),
                         [](const auto& info) {
                           return info.param == Kernels::kNative ? "native" : "aten";
                         });

TEST(ProfiledPass, HasTheSameBits) {
  const auto model =
      models::random_model(testing::tiny_config_json(), 1, {{.dtype = at::kBFloat16}, true});
  model->params().ensure_grads();
  const auto vocab = static_cast<int32_t>(model->shape().vocab);
  const trie::Plan plan = trie::plan(make_workload("P40R9n4", vocab, /*seed=*/1), {});
  const auto gradients = [&](bool profiled) {
    model->params().zero_grads();
    if (profiled) profile::start();
    train::probe_pass(*model, plan);
    if (profiled) {
      EXPECT_GT(profile::stop().size(), 10u);
    }
    std::vector<at::Tensor> out;
    for (const Param& param : model->params().params()) out.push_back(param.grad.clone());
    return out;
  };
  const std::vector<at::Tensor> off = gradients(false);
  const std::vector<at::Tensor> on = gradients(true);
  for (size_t i = 0; i < off.size(); ++i) EXPECT_TRUE(at::equal(off[i], on[i])) << i;
}

TEST(ScalingBench, RunsEveryBatchInEveryRound) {
  const auto model =
      models::random_model(testing::tiny_config_json(), 1, {{.dtype = at::kBFloat16}, true});
  ScalingOptions options;
  options.presets = {"P20R5n2x2", "P20R5n2x4"};
  options.repeats = 2;
  options.plan.max_samples_per_block = 4;
  const std::vector<ScalingSide> passes = bench_scaling(*model, options);
  const std::vector<ScalingSide> plans = bench_planning(model->shape().vocab, options);
  ASSERT_EQ(passes.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(passes[i].seconds.size(), 2u);
    EXPECT_EQ(plans[i].seconds.size(), 2u);
    EXPECT_EQ(passes[i].logical_tokens, i == 0 ? 100 : 200);
    EXPECT_EQ(passes[i].unique_tokens, i == 0 ? 60 : 120);
    EXPECT_EQ(passes[i].blocks, i == 0 ? 1 : 2);
    EXPECT_EQ(plans[i].blocks, passes[i].blocks);
  }
}

}  // namespace
}  // namespace banyan::bench
