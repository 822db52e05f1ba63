// Experts cut over another number of ranks than the rest of a layer (expert_tensor_parallel_size):
// whole ones over ranks of tensor parallel, or parts of them over ranks with samples of their own,
// give what one process gives. The ranks are threads here.
#include <gtest/gtest.h>

#include "banyan/testing/expert_steps.h"

namespace banyan::train {
namespace {

using banyan::testing::experts::Case;
using banyan::testing::experts::expect_equals_one;
using banyan::testing::experts::four_layers;

TEST(ExpertParts, WholeExpertsOverTensorParallelRanksEqualOneProcess) {
  for (const bool sequence : {false, true}) {
    const std::string how = sequence ? " sequence" : "";
    for (const bool share : {true, false}) {
      const Case with{.share = share, .with_losses = share, .sequence = sequence, .parts = 1};
      expect_equals_one(with, {.tp = 2, .ep = 2}, 2, "tp 2 ep 2 etp 1" + how);
      expect_equals_one(with, {.tp = 2}, 2, "tp 2 etp 1" + how);
    }
    const Case with{.with_losses = true, .sequence = sequence, .parts = 1};
    expect_equals_one(with, {.tp = 2, .ep = 4}, 4, "tp 2 ep 4 etp 1" + how);
    expect_equals_one(with, {.tp = 2}, 4, "tp 2 dp 2 etp 1" + how);
    const Case single{.dtype = at::kFloat, .num_samples = 3, .sequence = sequence, .parts = 1};
    expect_equals_one(single, {.tp = 2, .ep = 4}, 4, "one group" + how);
  }
}

TEST(ExpertParts, OverRanksWithSamplesOfTheirOwnEqualOneProcess) {
  for (const bool share : {true, false}) {
    const Case with{.share = share, .with_losses = share, .parts = 2};
    expect_equals_one(with, {.etp = 2}, 2, "etp 2");
    expect_equals_one(with, {.ep = 2, .etp = 2}, 4, "ep 2 etp 2");
  }
  expect_equals_one({.dtype = at::kFloat, .parts = 2}, {.etp = 2}, 4, "etp 2 edp 2");
  expect_equals_one({.num_samples = 3, .parts = 2}, {.ep = 2, .etp = 2}, 4, "one group");
  const nn::Recompute uniform{.method = nn::RecomputeMethod::kUniform, .num_layers = 2};
  expect_equals_one({.recompute = uniform, .parts = 2}, {.etp = 2}, 2, "recompute");
  expect_equals_one({.with_losses = true, .parts = 2}, {.cp = 2, .etp = 2}, 2, "cp 2 etp 2");
}

TEST(ExpertParts, FewerPartsThanTensorParallelRanksEqualOneProcess) {
  for (const bool sequence : {false, true}) {
    const Case with{.with_losses = true, .sequence = sequence, .parts = 2};
    expect_equals_one(with, {.tp = 4, .ep = 2, .etp = 2}, 4, "tp 4 ep 2 etp 2");
  }
}

TEST(ExpertParts, InAPipelineEqualOneProcess) {
  Case with{.model = four_layers(), .with_losses = true, .parts = 1};
  expect_equals_one(with, {.tp = 2, .ep = 2, .pp = 2}, 4, "tp 2 ep 2 etp 1 pp 2");
  with.sequence = true;
  with.chunks = 2;
  expect_equals_one(with, {.tp = 2, .ep = 2, .pp = 2}, 4, "tp 2 ep 2 etp 1 pp 2 x 2");
  with.parts = 2;
  expect_equals_one(with, {.pp = 2, .etp = 2}, 4, "etp 2 pp 2 x 2");
}

}  // namespace
}  // namespace banyan::train
