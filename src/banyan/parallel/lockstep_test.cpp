#include "banyan/parallel/lockstep.h"

#include <gtest/gtest.h>

#include <random>

#include "banyan/parallel/pass_order.h"
#include "banyan/parallel/pipeline_schedule.h"
#include "banyan/testing/random_trie.h"
#include "banyan/testing/thread_transport.h"

namespace banyan::parallel {
namespace {

using trie::Action;
using trie::Entry;

std::string log_of(const std::vector<Entry>& entries) {
  std::string text;
  for (const Entry& entry : entries) {
    text += (text.empty() ? "" : " ");
    text += "FLRB"[static_cast<int>(entry.action)];
    text += entry.block == kIdle ? "-" : std::to_string(entry.block);
  }
  return text;
}

std::vector<Entry> random_entries(uint64_t seed, int64_t tokens, bool recompute) {
  trie::PlanOptions options;
  options.max_tokens_per_block = tokens;
  options.carry = recompute ? trie::Carry::kRecompute : trie::Carry::kRetain;
  return trie::plan(testing::random_samples(
                        {.seed = seed, .depth = static_cast<int32_t>(seed % 5), .max_fan_out = 4}),
                    options)
      .entries;
}

bool is_loss(const Entry& entry) { return entry.action == Action::kLoss; }

}  // namespace

TEST(Lockstep, IdlePassesStandWhereOthersHaveTheirs) {
  const std::vector<Entry> dense = {{Action::kForward, 0},
                                    {Action::kLoss, 0},
                                    {Action::kBackward, 0},
                                    {Action::kForward, 1},
                                    {Action::kLoss, 1},
                                    {Action::kBackward, 1}};
  const std::vector<Entry> bracket = {{Action::kForward, 0},
                                      {Action::kForward, 1},
                                      {Action::kLoss, 1},
                                      {Action::kBackward, 1},
                                      {Action::kForward, 2},
                                      {Action::kLoss, 2},
                                      {Action::kBackward, 2},
                                      {Action::kRecompute, 0},
                                      {Action::kBackward, 0}};
  EXPECT_EQ(passes_of(dense), "FBFB");
  EXPECT_EQ(passes_of(bracket), "FFBFBR");
  testing::run_ranks(3, [&](Collectives& ranks) {
    const std::vector<std::vector<Entry>> of = {dense, bracket, {}};
    const std::vector<std::string> wanted = {
        "F0 L0 F- B0 F1 L1 B1 R- B-", "F0 F1 L1 B1 F2 L2 B2 R0 B0", "F- F- B- F- B- R- B-"};
    EXPECT_EQ(log_of(in_lockstep(of[ranks.rank()], ranks)), wanted[ranks.rank()]);
  });
}

// Of any plans: nothing is lost or moved, and the pipelines of all ranks run equal steps.
TEST(Lockstep, PipelinesOfAnyPlansRunEqualSteps) {
  std::mt19937 draw(3);
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::vector<std::vector<Entry>> own;
    std::vector<std::string> passes;
    for (uint64_t rank = 0; rank < 2 + seed % 3; ++rank) {
      own.push_back(rank == 2 ? std::vector<Entry>()
                              : random_entries(10 * seed + rank,
                                               8 + static_cast<int64_t>(draw() % 40),
                                               draw() % 2 == 0));
      passes.push_back(passes_of(own.back()));
    }
    const std::string order = common_order(passes);
    std::vector<std::vector<Entry>> all;
    for (const std::vector<Entry>& entries : own) {
      all.push_back(padded(entries, order));
      std::vector<Entry> kept;
      for (const Entry& entry : all.back()) {
        if (entry.block != kIdle) kept.push_back(entry);
      }
      EXPECT_EQ(log_of(kept), log_of(entries)) << seed;
    }
    for (const auto& [p, v] : {std::pair<int64_t, int64_t>{1, 1}, {2, 1}, {4, 1}, {2, 2}, {3, 3}}) {
      std::vector<std::vector<PipelineSteps>> lists;
      for (std::vector<Entry> entries : all) {
        std::erase_if(entries, is_loss);
        lists.push_back(pipeline_schedule(entries, p, v));
        EXPECT_TRUE(completes(lists.back(), v)) << seed;
      }
      for (const std::vector<PipelineSteps>& ranks : lists) {
        for (int64_t r = 0; r < p; ++r) {
          ASSERT_EQ(ranks[r].size(), lists[0][r].size()) << seed;
          for (size_t i = 0; i < ranks[r].size(); ++i) {
            EXPECT_EQ(ranks[r][i].action, lists[0][r][i].action) << seed;
            EXPECT_EQ(ranks[r][i].chunk, lists[0][r][i].chunk) << seed;
          }
        }
      }
    }
  }
}

}  // namespace banyan::parallel
