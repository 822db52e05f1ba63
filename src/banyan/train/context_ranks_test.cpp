// Context parallel through updates: ranks that compute each pass over their samples together, by
// ranges of tries or by heads, beside other ranks and cuts, give what one process gives. The ranks
// are threads here; tests/distributed runs the same over processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "banyan/testing/context_steps.h"

namespace banyan::train {

using namespace banyan::testing::context;
using parallel::Groups;
using parallel::MeshShape;

TEST(ContextRanks, UpdatesEqualOneProcess) {
  for (const bool share : {true, false}) {
    const Case with{.share = share};
    const Trained one = alone(with);
    EXPECT_GT(one.first.num_blocks, 2);
    for (const ContextKind kind : {kRanges, kHeads}) {
      const std::string name = kind == kRanges ? "ranges" : "heads";
      expect_equals_one(with, {.name = name, .kind = kind}, one);
      expect_equals_one(with, {.name = name + ", dp 2", .size = 4, .kind = kind}, one);
    }
    expect_equals_one(with, {.name = "three", .size = 3, .mesh = {.cp = 3}}, one);
    // More query heads than key heads on four ranks.
    expect_equals_one(
        with, {.name = "four heads", .size = 4, .mesh = {.cp = 4}, .kind = kHeads}, one);
  }
}

TEST(ContextRanks, InFp32TooAndWithLayersThatRunAgain) {
  for (const bool again : {false, true}) {
    Case with{.dtype = at::kFloat};
    if (again) with.recompute = full(2);
    const Trained one = alone(with);
    for (const ContextKind kind : {kRanges, kHeads}) {
      expect_equals_one(with, {.name = "fp32", .kind = kind}, one);
    }
  }
}

TEST(ContextRanks, BesideTensorParallelRanks) {
  for (const bool share : {true, false}) {
    const Case with{.share = share};
    const Trained one = alone(with);
    for (const bool sequence : {false, true}) {
      for (const ContextKind kind : {kRanges, kHeads}) {
        const std::string name = std::string("tp 2 x cp 2") + (sequence ? ", SP" : "");
        expect_equals_one(with,
                          {.name = name,
                           .size = 4,
                           .mesh = {.tp = 2, .cp = 2},
                           .kind = kind,
                           .sequence = sequence},
                          one);
      }
    }
  }
}

TEST(ContextRanks, WithWeightsInParts) {
  for (const bool share : {true, false}) {
    Case with{.share = share};
    if (share) with.recompute = full(2);
    const Trained one = alone(with);
    for (const ContextKind kind : {kRanges, kHeads}) {
      const std::string name = kind == kRanges ? "fsdp, ranges" : "fsdp, heads";
      expect_equals_one(with, {.name = name, .kind = kind, .fsdp = true}, one);
      const Sharding kept{.reshard_after_forward = false, .forward_prefetch = true};
      expect_equals_one(
          with,
          {.name = name + ", dp 2", .size = 4, .kind = kind, .fsdp = true, .sharding = kept},
          one);
      expect_equals_one(with,
                        {.name = name + ", hybrid",
                         .size = 4,
                         .mesh = {.cp = 2, .shard = 2},
                         .kind = kind,
                         .fsdp = true,
                         .sharding = {.reduce_each_block = false}},
                        one);
    }
  }
}

// Fewer tokens than ranks: some have no block, and take part in what the others do.
TEST(ContextRanks, RanksWithoutATokenTakePart) {
  const Case with{.num_samples = 1};
  const Trained one = alone(with);
  for (const bool fsdp : {false, true}) {
    expect_equals_one(
        with, {.name = "idle ranges", .size = 9, .mesh = {.cp = 9}, .fsdp = fsdp}, one);
  }
  // Four groups of data-parallel ranks for one sample.
  for (const ContextKind kind : {kRanges, kHeads}) {
    expect_equals_one(with, {.name = "idle groups", .size = 8, .kind = kind, .fsdp = true}, one);
  }
}

TEST(ContextRanks, ExpertsAndTheirLossesEqualOneProcess) {
  const Case with{.model = testing::tiny_moe_config_json(), .with_losses = true};
  const Trained one = alone(with);
  for (const ContextKind kind : {kRanges, kHeads}) {
    expect_equals_one(
        with, {.name = "experts, tp 2", .size = 4, .mesh = {.tp = 2, .cp = 2}, .kind = kind}, one);
    for (const bool fsdp : {false, true}) {
      expect_equals_one(with, {.name = "experts", .kind = kind, .fsdp = fsdp}, one);
      expect_equals_one(
          with, {.name = "experts, dp 2", .size = 4, .kind = kind, .fsdp = fsdp}, one);
    }
  }
}

TEST(ContextRanks, ALossOfTheWholeMiniBatchAndLimitsOfSamples) {
  for (const Case& with :
       {Case{.loss_mode = "kl_cov"}, Case{.max_samples = 2}, Case{.max_samples = 1}}) {
    const Trained one = alone(with);
    const int64_t size = with.max_samples ? 2 : 4;
    for (const ContextKind kind : {kRanges, kHeads}) {
      expect_equals_one(with, {.name = "limits", .size = size, .kind = kind}, one);
    }
  }
}

}  // namespace banyan::train
