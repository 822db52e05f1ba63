#include "banyan/parallel/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "banyan/parallel/pipeline_stage.h"
#include "banyan/testing/random_trie.h"
#include "banyan/testing/thread_transport.h"

namespace banyan::parallel {
namespace {

using trie::Action;
using Ranks = std::vector<PipelineSteps>;

// Blocks of their own: forward, loss, backward each.
std::vector<trie::Entry> dense(int32_t count) {
  std::vector<trie::Entry> entries;
  for (int32_t b = 0; b < count; ++b) {
    for (const Action action : {Action::kForward, Action::kLoss, Action::kBackward}) {
      entries.push_back({action, b});
    }
  }
  return entries;
}

std::string log_of(const PipelineSteps& steps, bool with_chunks = false) {
  std::string text;
  for (const PipelineStep& step : steps) {
    text += (text.empty() ? "" : " ");
    text += "FLRB"[static_cast<int>(step.action)];
    text += std::to_string(step.round);
    if (with_chunks) text += "." + std::to_string(step.chunk);
  }
  return text;
}

// Most (block, chunk) between forward and backward at one time.
int64_t most_live(const PipelineSteps& steps) {
  int64_t live = 0, most = 0;
  for (const PipelineStep& step : steps) {
    live += step.action == Action::kForward ? 1 : step.action == Action::kBackward ? -1 : 0;
    most = std::max(most, live);
  }
  return most;
}

// Each (action, block, chunk) once, recomputes in front of their backwards, losses on the last rank
// in the order of the plan.
void expect_complete(const Ranks& ranks,
                     const std::vector<trie::Entry>& entries,
                     int64_t num_chunks,
                     const std::string& what) {
  ASSERT_TRUE(completes(ranks, num_chunks)) << what;
  for (size_t r = 0; r < ranks.size(); ++r) {
    std::set<std::tuple<int, int32_t, int32_t>> seen;
    std::vector<int32_t> losses;
    for (const PipelineStep& step : ranks[r]) {
      EXPECT_TRUE(seen.emplace(static_cast<int>(step.action), step.round, step.chunk).second);
      if (step.action == Action::kLoss) losses.push_back(step.round);
    }
    std::vector<int32_t> wanted;
    size_t count = 0;
    for (const trie::Entry& entry : entries) {
      if (entry.action == Action::kLoss) {
        if (r + 1 == ranks.size()) wanted.push_back(entry.block);
        continue;
      }
      for (int32_t c = 0; c < num_chunks; ++c, ++count) {
        EXPECT_EQ(seen.count({static_cast<int>(entry.action), entry.block, c}), 1u) << what;
      }
    }
    EXPECT_EQ(losses, wanted) << what;
    EXPECT_EQ(seen.size(), count + wanted.size()) << what;
    for (size_t i = 0; i < ranks[r].size(); ++i) {
      if (ranks[r][i].action != Action::kRecompute) continue;
      EXPECT_EQ(ranks[r].at(i + 1),
                (PipelineStep{Action::kBackward, ranks[r][i].round, ranks[r][i].chunk}));
    }
  }
}

TEST(PipelineSchedule, OneForwardOneBackward) {
  const Ranks ranks = pipeline_schedule(dense(5), 3, 1);
  EXPECT_EQ(log_of(ranks[0]), "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4");
  EXPECT_EQ(log_of(ranks[1]), "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4");
  EXPECT_EQ(log_of(ranks[2]), "F0 L0 B0 F1 L1 B1 F2 L2 B2 F3 L3 B3 F4 L4 B4");
  for (int32_t m = 1; m <= 9; ++m) {
    for (int64_t p = 2; p <= 5; ++p) {
      const Ranks each = pipeline_schedule(dense(m), p, 1);
      expect_complete(each, dense(m), 1, "dense");
      for (int64_t r = 0; r < p; ++r) {
        EXPECT_EQ(most_live(each[r]), std::min<int64_t>(m, p - r)) << m << " " << p;
      }
    }
  }
}

TEST(PipelineSchedule, OneRankRunsTheEntries) {
  const Ranks ranks = pipeline_schedule(dense(2), 1, 1);
  EXPECT_EQ(log_of(ranks.at(0)), "F0 L0 B0 F1 L1 B1");
}

TEST(PipelineSchedule, ABracketKeepsItsOrder) {
  const std::vector<trie::Entry> bracket = {{Action::kForward, 0},
                                            {Action::kLoss, 0},
                                            {Action::kForward, 1},
                                            {Action::kLoss, 1},
                                            {Action::kBackward, 1},
                                            {Action::kForward, 2},
                                            {Action::kLoss, 2},
                                            {Action::kBackward, 2},
                                            {Action::kForward, 3},
                                            {Action::kLoss, 3},
                                            {Action::kBackward, 3},
                                            {Action::kRecompute, 0},
                                            {Action::kBackward, 0}};
  const Ranks ranks = pipeline_schedule(bracket, 2, 1);
  EXPECT_EQ(log_of(ranks[0]), "F0 F1 F2 B1 F3 B2 B3 R0 B0");
  EXPECT_EQ(log_of(ranks[1]), "F0 L0 F1 L1 B1 F2 L2 B2 F3 L3 B3 R0 B0");
  EXPECT_EQ(log_of(pipeline_schedule(bracket, 2, 2)[1], true),
            "F0.0 F1.0 F0.1 L0.1 F1.1 L1.1 B1.1 F2.0 F3.0 F2.1 L2.1 B2.1 F3.1 L3.1 B1.0 B2.0 "
            "B3.1 R0.1 B0.1 B3.0 R0.0 B0.0");
}

TEST(PipelineSchedule, ScoringIsForwardsAlone) {
  std::vector<trie::Entry> entries;
  for (int32_t b = 0; b < 3; ++b) entries.push_back({Action::kForward, b});
  const Ranks ranks = pipeline_schedule(entries, 2, 2);
  EXPECT_EQ(log_of(ranks[0], true), "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1");
  EXPECT_EQ(ranks[0], ranks[1]);
}

// Megatron's interleaved schedule, with groups of p and what does not divide in the first.
TEST(PipelineSchedule, InterleavedOnDenseBlocks) {
  for (int64_t p = 2; p <= 5; ++p) {
    for (int64_t v = 2; v <= 4; ++v) {
      for (int32_t m = 1; m <= 13; ++m) {
        const std::string what =
            std::to_string(p) + "," + std::to_string(v) + "," + std::to_string(m);
        const Ranks ranks = pipeline_schedule(dense(m), p, v);
        expect_complete(ranks, dense(m), v, what);
        const int64_t group = m < p ? m : p + m % p;
        for (int64_t r = 0; r < p; ++r) {
          const int64_t warm_up = std::min<int64_t>(m * v, 2 * (p - r - 1) + (v - 1) * group);
          int64_t before = 0;
          for (const PipelineStep& step : ranks[r]) {
            if (step.action == Action::kBackward) break;
            before += step.action == Action::kForward ? 1 : 0;
          }
          EXPECT_EQ(before, std::min<int64_t>(m * v, warm_up + 1)) << what << " rank " << r;
          EXPECT_EQ(most_live(ranks[r]), std::min<int64_t>(m * v, warm_up + 1))
              << what << " rank " << r;
          // Behind the warm-up forwards and backwards take turns.
          int64_t forwards = 0, backwards = 0;
          for (const PipelineStep& step : ranks[r]) {
            forwards += step.action == Action::kForward ? 1 : 0;
            if (step.action != Action::kBackward) continue;
            ++backwards;
            EXPECT_EQ(forwards, std::min<int64_t>(m * v, warm_up + backwards)) << what;
          }
        }
      }
    }
  }
  const Ranks four = pipeline_schedule(dense(8), 4, 2);
  EXPECT_EQ(most_live(four[0]), 11);
  EXPECT_EQ(most_live(four[1]), 9);
  EXPECT_EQ(most_live(four[2]), 7);
  EXPECT_EQ(most_live(four[3]), 5);
}

TEST(PipelineSchedule, AStageHoldsNoMoreThanItSays) {
  for (const auto& [p, v] : {std::pair<int64_t, int64_t>{2, 1}, {4, 1}, {2, 2}, {4, 2}, {3, 3}}) {
    testing::run_ranks(p, [&](Collectives& ranks) {
      const PipelineStage stage(
          ranks,
          ranks,
          p * v,
          {.pipeline_model_parallel_size = p, .virtual_pipeline_model_parallel_size = v});
      int64_t most = 0;
      for (int32_t m = 1; m < 4 * p; ++m) {
        most = std::max(most, most_live(pipeline_schedule(dense(m), p, v)[ranks.rank()]));
      }
      EXPECT_EQ(most, stage.num_in_flight()) << p << " " << v << " rank " << ranks.rank();
    });
  }
}

// On one rank and chunk a block runs behind those it carries from, and goes back before them.
void expect_carry_kept(const Ranks& ranks, const trie::Plan& plan, const std::string& what) {
  for (const PipelineSteps& steps : ranks) {
    std::map<std::tuple<int, int32_t, int32_t>, size_t> at;
    for (size_t i = 0; i < steps.size(); ++i) {
      at[{static_cast<int>(steps[i].action), steps[i].round, steps[i].chunk}] = i;
    }
    for (const PipelineStep& step : steps) {
      const auto place = [&](Action action, int32_t block) {
        return at.at({static_cast<int>(action), block, step.chunk});
      };
      for (const trie::Carried& from : plan.blocks[step.round].carried) {
        if (step.action == Action::kForward) {
          EXPECT_LT(place(Action::kForward, from.block), place(Action::kForward, step.round))
              << what;
        } else if (step.action == Action::kBackward) {
          EXPECT_LT(place(Action::kBackward, step.round), place(Action::kBackward, from.block))
              << what;
        }
      }
    }
  }
}

TEST(PipelineSchedule, EveryPlanOfRandomTriesGoesThrough) {
  std::mt19937 draw(5);
  int64_t num_open = 0;
  for (uint64_t seed = 0; seed < 120; ++seed) {
    const std::vector<Sample> samples = testing::random_samples(
        {.seed = seed, .depth = static_cast<int32_t>(seed % 5), .max_fan_out = 4});
    trie::PlanOptions options;
    options.build.share = seed % 7 != 0;
    options.max_tokens_per_block = 8 + static_cast<int64_t>(draw() % 40);
    options.carry = seed % 2 == 0 ? trie::Carry::kRetain : trie::Carry::kRecompute;
    const trie::Plan plan = trie::plan(samples, options);
    for (const trie::Block& block : plan.blocks) num_open += block.offered.empty() ? 0 : 1;
    for (const auto& [p, v] : {std::pair<int64_t, int64_t>{2, 1}, {4, 1}, {2, 2}, {3, 3}, {4, 2}}) {
      const std::string what =
          std::to_string(seed) + ": " + std::to_string(p) + " x " + std::to_string(v);
      const Ranks ranks = pipeline_schedule(plan.entries, p, v);
      expect_complete(ranks, plan.entries, v, what);
      expect_carry_kept(ranks, plan, what);
      if (v == 1) {
        // The last rank runs the plan; blocks of the others wait for at most p - 1 more.
        int64_t most_of_plan = most_live(ranks[p - 1]);
        for (int64_t r = 0; r < p; ++r) {
          EXPECT_LE(most_live(ranks[r]), most_of_plan + p - 1 - r) << what;
        }
      }
    }
  }
  EXPECT_GT(num_open, 100);
}

TEST(PipelineSchedule, EqualInputsAreSeenAgain) {
  PipelineSchedules known;
  const Ranks* first = &known.of(dense(4), 2, 1);
  EXPECT_EQ(*first, pipeline_schedule(dense(4), 2, 1));
  EXPECT_EQ(known.of(dense(5), 2, 1), pipeline_schedule(dense(5), 2, 1));
  EXPECT_EQ(known.of(dense(4), 2, 2), pipeline_schedule(dense(4), 2, 2));
  EXPECT_EQ(&known.of(dense(4), 2, 1), first);
  for (int32_t m = 6; m < 20; ++m) known.of(dense(m), 2, 1);
  EXPECT_EQ(known.of(dense(4), 2, 1), pipeline_schedule(dense(4), 2, 1));
}

TEST(PipelineSchedule, ACircleIsNoticed) {
  const PipelineStep forward{Action::kForward, 0, 0}, backward{Action::kBackward, 0, 0};
  EXPECT_TRUE(completes({{forward, backward}, {forward, backward}}, 1));
  EXPECT_FALSE(completes({{backward, forward}, {forward, backward}}, 1));
}

}  // namespace
}  // namespace banyan::parallel
