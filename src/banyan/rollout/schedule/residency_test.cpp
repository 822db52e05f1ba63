// Who gives way when there are no pages left, and what is there once groups end: one test per rule,
// on the paper engine.
#include <gtest/gtest.h>

#include "banyan/rollout/schedule/paper_engine.h"
#include "banyan/rollout/schedule/scheduler.h"

namespace banyan::rollout {
namespace {

// --- preemption ---

TEST(Scheduler, ATinyPoolPreemptsAndEnds) {
  std::mt19937 random(5);
  std::vector<std::vector<int32_t>> prompts;
  for (int32_t row = 0; row < 4; ++row) prompts.push_back(random_tokens(random, 100));
  const int32_t least = pages_of_one(100, 300);
  int64_t preemptions = 0;
  for (int32_t pages = least; pages < least + 12; ++pages) {
    PaperEngine engine({}, pages);
    for (const auto& prompt : prompts) engine.add(prompt, 4, 300);
    engine.run();
    for (int32_t id = 0; id < 4; ++id) engine.check_responses(id);
    preemptions += engine.scheduler().counters().preemptions;
  }
  EXPECT_GT(preemptions, 0);
}

TEST(Scheduler, TheYoungestGroupGivesWayAndKeepsItsTrunkWhileASiblingLives) {
  std::mt19937 random(16);
  // Expectations far too low: everything starts, and the pool runs out.
  PaperEngine engine({.conservativeness = 0.01}, 24);
  engine.never_stops = true;
  const auto add = [&](int32_t n) {
    return engine.add(GroupRequest{.prompt = random_tokens(random, 130), .n = n, .max_new = 350});
  };
  const int32_t old_group = add(2);
  const int32_t young = add(3);
  bool trunk_stayed = false;
  std::vector<int32_t> before;
  while (engine.scheduler().counters().preemptions == 0) {
    before = engine.response(young, 2);
    ASSERT_TRUE(engine.step());
  }
  int32_t preempted = 0;
  for (const Sequence& sequence : engine.group(young).sequences) {
    preempted += sequence.num_retractions;
  }
  EXPECT_EQ(preempted, 1);
  EXPECT_EQ(engine.group(young).sequences[2].num_retractions, 1)
      << "of siblings with as many pages the last";
  EXPECT_TRUE(std::equal(before.begin(), before.end(), engine.response(young, 2).begin()))
      << "its tokens are kept";
  while (engine.scheduler().num_running() > 2) {
    trunk_stayed |= engine.group(young).num_held > 0 && engine.scheduler().num_running() == 4;
    ASSERT_TRUE(engine.step());
  }
  EXPECT_TRUE(trunk_stayed);
  for (const Sequence& sequence : engine.group(old_group).sequences) {
    EXPECT_EQ(sequence.num_retractions, 0) << "the senior gives nothing";
  }
  const double quantile = engine.scheduler().lengths().quantile();
  EXPECT_GT(quantile, 0.7) << "a preemption raises what is expected";
  engine.run();
  for (const int32_t id : {old_group, young}) engine.check_responses(id);
}

TEST(Scheduler, PriorityDecidesWhoGivesWay) {
  std::mt19937 random(17);
  PaperEngine engine({.conservativeness = 0.01, .policy = SchedulingPolicy::kPriority}, 12);
  engine.never_stops = true;
  const auto add = [&](int32_t priority) {
    return engine.add(
        GroupRequest{.prompt = random_tokens(random, 64), .max_new = 450, .priority = priority});
  };
  const int32_t unimportant = add(7);
  engine.step();
  const int32_t important = add(1);
  engine.run();
  EXPECT_GT(engine.group(unimportant).sequences[0].num_retractions, 0);
  EXPECT_EQ(engine.group(important).sequences[0].num_retractions, 0);
}

TEST(Scheduler, APreemptedResponseFindsItsPagesAgain) {
  std::mt19937 random(18);
  PaperEngine engine({}, 40);
  const int32_t id = engine.add(
      GroupRequest{.prompt = random_tokens(random, 100), .max_new = 300, .ignore_eos = true});
  for (int32_t pass = 0; pass < 200; ++pass) engine.step();
  EXPECT_EQ(engine.scheduler().retract_all(), 1);
  EXPECT_EQ(engine.scheduler().num_running(), 0);
  EXPECT_EQ(engine.scheduler().num_used_pages(), 0);
  engine.run();
  engine.check_responses(id);
  EXPECT_EQ(engine.group(id).sequences[0].num_retractions, 1);
  EXPECT_LT(engine.scheduler().counters().recomputed_tokens, kPageTokens);
}

// Greedy siblings: another response has computed every known position of this one.
TEST(Scheduler, AResponseWhoseTwinIsAheadStillComputesItsLastToken) {
  std::mt19937 random(19);
  PaperEngine engine({}, 40);
  const std::vector<int32_t> prompt = random_tokens(random, 64);
  const GroupRequest request{.prompt = prompt, .max_new = 150, .ignore_eos = true};
  const int32_t ahead = engine.add(request, /*row=*/5);
  for (int32_t pass = 0; pass < 70; ++pass) engine.step();
  const int32_t behind = engine.add(request, /*row=*/5);
  while (engine.response(behind).size() < 64) ASSERT_TRUE(engine.step());
  engine.scheduler().retract_all();
  engine.run();
  for (const int32_t id : {ahead, behind}) engine.check_responses(id);
  EXPECT_EQ(engine.response(ahead), engine.response(behind));
}

// --- ends ---

TEST(Scheduler, ADroppedGroupIsCounted) {
  PaperEngine engine({.max_num_seqs = 2}, 100);
  const int32_t id =
      engine.add(GroupRequest{.prompt = {1, 2}, .n = 6, .max_new = 8, .ignore_eos = true});
  while (engine.group(id).num_finished < 3) ASSERT_TRUE(engine.step());
  engine.drop(id);
  EXPECT_TRUE(engine.scheduler().idle());
  EXPECT_EQ(engine.scheduler().counters().dropped_groups, 1);
  engine.check_responses(id);
  engine.drop(id);  // again: no effect
  EXPECT_EQ(engine.scheduler().counters().dropped_groups, 1);
}

TEST(Scheduler, IdsAreUsedAgain) {
  PaperEngine engine({}, 100);
  const int32_t a = engine.add({1}, 1, 3);
  const int32_t b = engine.add({2}, 1, 3);
  engine.run();
  engine.forget(a);
  EXPECT_EQ(engine.add({3}, 1, 3), a);
  engine.run();
  engine.check_responses(a);
  engine.check_responses(b);
}

}  // namespace
}  // namespace banyan::rollout
