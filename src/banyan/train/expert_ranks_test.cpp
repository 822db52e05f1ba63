// Experts over ranks: those that hold some of the experts each (expert parallel), a part of each
// (tensor parallel), or a part of some, give what one process gives. The ranks are threads here;
// tests/distributed runs the same over processes.
#include <gtest/gtest.h>

#include "banyan/testing/expert_steps.h"

namespace banyan::train {
namespace {

using banyan::testing::experts::Case;
using banyan::testing::experts::expect_equals_one;
using banyan::testing::experts::Outcome;
using banyan::testing::experts::three_steps;
using parallel::Groups;
using parallel::MeshShape;

TEST(ExpertRanks, GradientsAndWeightsEqualThoseOfOneProcess) {
  for (const bool share : {true, false}) {
    const std::string how = share ? " on" : " off";
    expect_equals_one({.share = share}, {.ep = 2}, 2, "ep 2" + how);
    expect_equals_one({.dtype = at::kFloat, .share = share}, {.ep = 2}, 2, "ep 2 fp32" + how);
    expect_equals_one({.share = share}, {.ep = 2}, 4, "ep 2 dp 2" + how);
    expect_equals_one({.share = share}, {.ep = 4}, 4, "ep 4" + how);
    expect_equals_one({.share = share, .with_losses = true}, {.ep = 2}, 4, "losses" + how);
  }
}

TEST(ExpertRanks, PartsOfExpertsOverTensorParallelRanksEqualOneProcess) {
  for (const bool sequence : {false, true}) {
    const std::string how = sequence ? " sequence" : "";
    for (const bool share : {true, false}) {
      const Case with{.share = share, .with_losses = share, .sequence = sequence};
      expect_equals_one(with, {.tp = 2}, 2, "tp 2" + how);
      expect_equals_one(with, {.tp = 2, .ep = 2, .etp = 2}, 4, "ep 2 etp 2" + how);
    }
    expect_equals_one({.dtype = at::kFloat, .sequence = sequence}, {.tp = 2}, 4, "tp 2 dp 2" + how);
  }
}

TEST(ExpertRanks, BesideContextParallelEqualOneProcess) {
  for (const bool by_heads : {false, true}) {
    const std::string how = by_heads ? " heads" : " ranges";
    const Case with{.with_losses = true, .by_heads = by_heads};
    expect_equals_one(with, {.cp = 2, .ep = 2}, 2, "cp 2 ep 2" + how);
    expect_equals_one(with, {.cp = 2, .ep = 4}, 4, "cp 2 ep 4" + how);
    expect_equals_one(
        {.num_samples = 3, .by_heads = by_heads}, {.cp = 2, .ep = 2}, 4, "one group" + how);
  }
}

TEST(ExpertRanks, RecomputeAndRanksWithoutSamplesStayInStep) {
  using nn::RecomputeMethod;
  const nn::Recompute uniform{.method = RecomputeMethod::kUniform, .num_layers = 2};
  expect_equals_one({.recompute = uniform}, {.ep = 2}, 2, "uniform 2");
  expect_equals_one({.recompute = {.method = RecomputeMethod::kUniform, .num_layers = 9}},
                    {.ep = 2},
                    4,
                    "uniform 9");
  expect_equals_one(
      {.recompute = {.method = RecomputeMethod::kBlock, .num_layers = 1}}, {.ep = 2}, 2, "block 1");
  expect_equals_one({.with_losses = true, .num_samples = 3}, {.ep = 4}, 4, "one group");
  expect_equals_one({.recompute = uniform, .num_samples = 3, .sequence = true},
                    {.tp = 2, .ep = 2, .etp = 2},
                    4,
                    "one group, ep 2 etp 2");
}

// The forward has the bits of one process.
TEST(ExpertRanks, LogProbabilitiesHaveTheBitsOfOneProcess) {
  const Case with{.dtype = at::kBFloat16};
  Groups alone;
  const Outcome one = three_steps(with, alone);
  testing::run_mesh(2, MeshShape{.ep = 2}, [&](Groups& groups) {
    const Outcome part = three_steps(with, groups);
    ASSERT_EQ(part.result.log_prob.size(), one.result.log_prob.size());
    for (size_t i = 0; i < one.result.log_prob.size(); ++i) {
      EXPECT_TRUE(part.result.log_prob[i].equal(one.result.log_prob[i])) << i;
    }
  });
}

}  // namespace
}  // namespace banyan::train
