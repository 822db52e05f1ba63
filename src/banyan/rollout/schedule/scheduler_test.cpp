// One test per rule of the schedule, on the paper engine: what is computed, and once. Who starts is
// in admission_test.cpp, who gives way in residency_test.cpp.
#include "banyan/rollout/schedule/scheduler.h"

#include <gtest/gtest.h>

#include "banyan/rollout/schedule/paper_engine.h"

namespace banyan::rollout {
namespace {

// --- the prompt once ---

TEST(Scheduler, APromptIsPrefilledOncePerGroup) {
  std::mt19937 random(1);
  for (const int32_t length : {1, 63, 64, 65, 128, 200}) {
    PaperEngine engine({}, 100);
    const int32_t id = engine.add(random_tokens(random, length), /*n=*/8, /*max_new=*/20);
    engine.run();
    engine.check_responses(id);
    EXPECT_EQ(engine.num_prompt_tokens, length);
    EXPECT_LE(engine.num_copies, 7) << "the last sibling writes in the tail itself";
    const SchedulerCounters counters = engine.scheduler().counters();
    EXPECT_EQ(counters.preemptions, 0);
    EXPECT_EQ(counters.prompt_tokens, length);
    EXPECT_EQ(counters.cached_prompt_tokens, 0);
    EXPECT_EQ(counters.sibling_shared_tokens, 7 * length);
    EXPECT_EQ(engine.group(id).num_cached, 0);
  }
}

TEST(Scheduler, ChildrenStartWhenThePromptIsThere) {
  std::mt19937 random(2);
  PaperEngine engine({.max_num_batched_tokens = 50}, 100);
  engine.add(random_tokens(random, 120), /*n=*/4, /*max_new=*/5);
  for (int32_t pass = 0; pass < 3; ++pass) {
    ASSERT_TRUE(engine.step());
    EXPECT_EQ(engine.scheduler().num_running(), 0);
    EXPECT_EQ(engine.pass.trunks.size(), pass == 2 ? 1u : 0u);
  }
  ASSERT_TRUE(engine.step());
  EXPECT_EQ(engine.pass.num_decode_runs, 4);
}

TEST(Scheduler, GroupsShareWholePagesOfTheirTrunk) {
  std::mt19937 random(2);
  const std::vector<int32_t> trunk = random_tokens(random, 2 * kPageTokens);
  std::vector<std::vector<int32_t>> prompts;
  for (int32_t i = 0; i < 3; ++i) prompts.push_back(join(trunk, random_tokens(random, 10)));
  prompts.push_back(trunk);            // ends inside the trunk of others
  prompts.push_back(prompts.front());  // an equal prompt
  for (const int32_t budget : {1, 7, 2048}) {
    PaperEngine engine({.max_num_batched_tokens = budget}, 100);
    for (const auto& prompt : prompts) engine.add(prompt, 2, 5);
    engine.run();
    for (int32_t id = 0; id < 5; ++id) engine.check_responses(id);
    // With one token a pass some are drawn later, from their last token computed again.
    EXPECT_LE(engine.num_prompt_tokens, 2 * kPageTokens + 3 * 10 + 2) << "budget " << budget;
    if (budget == 2048) {
      EXPECT_EQ(engine.num_prompt_tokens, 2 * kPageTokens + 3 * 10);
      EXPECT_EQ(engine.group(4).num_cached, 138);
      EXPECT_EQ(engine.group(2).num_cached, 128);
    }
  }
}

TEST(Scheduler, SeparateRequestsShareInTheSamePass) {
  std::mt19937 random(3);
  const std::vector<int32_t> prompt = random_tokens(random, 100);
  PaperEngine engine({}, 100);
  for (int32_t i = 0; i < 8; ++i) engine.add(prompt, 1, 5);
  ASSERT_TRUE(engine.step());
  EXPECT_EQ(engine.pass.num_prompt_tokens, 100);
  EXPECT_EQ(engine.pass.trunks.size(), 8u) << "all are drawn from one row";
  engine.run();
  EXPECT_EQ(engine.num_prompt_tokens, 100);
  EXPECT_EQ(engine.scheduler().counters().cached_prompt_tokens, 700);
}

TEST(Scheduler, AReaderWaitsWhileTheProducerIsMidChunk) {
  std::mt19937 random(4);
  const std::vector<int32_t> trunk = random_tokens(random, 192);
  PaperEngine engine({.max_num_batched_tokens = 300, .long_prefill_token_threshold = 100}, 100);
  engine.add(join(trunk, random_tokens(random, 20)), 1, 5);
  engine.add(join(trunk, random_tokens(random, 20)), 1, 5);
  ASSERT_TRUE(engine.step());
  EXPECT_EQ(engine.pass.num_prompt_tokens, 100) << "the second waits: its next page is in the make";
  ASSERT_TRUE(engine.step());
  EXPECT_EQ(engine.pass.num_prompt_tokens, 100 + 20) << "the trunk is there";
  ASSERT_TRUE(engine.step());
  EXPECT_EQ(engine.pass.num_prompt_tokens, 12);
  engine.run();
  EXPECT_EQ(engine.num_prompt_tokens, 192 + 40);
}

// --- the cache over calls ---

TEST(Scheduler, AnExactHitComputesTheLastTokenOnly) {
  std::mt19937 random(5);
  for (const int32_t length : {64, 100, 128}) {
    PaperEngine engine({}, 100);
    const std::vector<int32_t> prompt = random_tokens(random, length);
    engine.add(prompt, 2, 30);
    engine.run();
    const int64_t before = engine.num_prompt_tokens;
    const int32_t again = engine.add(prompt, 2, 30);
    engine.run();
    engine.check_responses(again);
    EXPECT_EQ(engine.num_prompt_tokens - before, 1) << length;
    EXPECT_EQ(engine.group(again).num_cached, length - 1);
  }
}

TEST(Scheduler, TheNextTurnFindsPromptAndResponse) {
  std::mt19937 random(6);
  PaperEngine engine({}, 100);
  const std::vector<int32_t> prompt = random_tokens(random, 100);
  const int32_t first =
      engine.add(GroupRequest{.prompt = prompt, .n = 3, .max_new = 120, .ignore_eos = true});
  engine.run();
  const std::vector<int32_t> turn = join(engine.response(first, 1), random_tokens(random, 30));
  const int64_t before = engine.num_prompt_tokens;
  const int32_t second = engine.add(join(prompt, turn), 1, 10);
  engine.run();
  engine.check_responses(second);
  // Three whole pages, and the last one up to where the first turn was computed.
  EXPECT_EQ(engine.num_prompt_tokens - before, 250 - 219);
}

TEST(Scheduler, PagesThatDifferInTheMiddleAreCopiedUpToThere) {
  std::mt19937 random(7);
  PaperEngine engine({}, 100);
  const std::vector<int32_t> trunk = random_tokens(random, 90);
  engine.add(join(trunk, random_tokens(random, 60)), 1, 2);
  engine.run();
  const int64_t before = engine.num_prompt_tokens;
  const int32_t second = engine.add(join(trunk, random_tokens(random, 60)), 1, 2);
  engine.run();
  engine.check_responses(second);
  EXPECT_EQ(engine.num_prompt_tokens - before, 60);
}

TEST(Scheduler, SaltsDoNotShare) {
  std::mt19937 random(8);
  PaperEngine engine({}, 100);
  const std::vector<int32_t> prompt = random_tokens(random, 100);
  engine.add(GroupRequest{.prompt = prompt, .max_new = 2, .salt = "a"});
  engine.add(GroupRequest{.prompt = prompt, .max_new = 2, .salt = "b"});
  engine.run();
  EXPECT_EQ(engine.num_prompt_tokens, 200);
  engine.add(GroupRequest{.prompt = prompt, .max_new = 2, .salt = "a"});
  engine.run();
  EXPECT_EQ(engine.num_prompt_tokens, 201);
}

TEST(Scheduler, WithoutSharingNothingIsFound) {
  std::mt19937 random(9);
  PaperEngine engine({.share_prefix = false}, 100);
  const std::vector<int32_t> prompt = random_tokens(random, 100);
  engine.add(prompt, 1, 5);
  engine.run();
  engine.add(prompt, 1, 5);
  engine.run();
  EXPECT_EQ(engine.num_prompt_tokens, 200);
  EXPECT_EQ(engine.scheduler().num_cached_pages(), 0);
}

TEST(Scheduler, AScoredPromptIsComputedWhole) {
  std::mt19937 random(10);
  PaperEngine engine({.max_num_batched_tokens = 30}, 100);
  const std::vector<int32_t> prompt = random_tokens(random, 100);
  engine.add(prompt, 1, 5);
  engine.run();
  const int32_t scored =
      engine.add(GroupRequest{.prompt = prompt, .n = 2, .max_new = 3, .score_prompt = true});
  const int32_t only =
      engine.add(GroupRequest{.prompt = prompt, .max_new = 0, .score_prompt = true});
  engine.run();
  engine.check_responses(scored);
  for (const int32_t id : {scored, only}) {
    EXPECT_EQ(engine.scored[id].size(), 100u) << "every position has a row";
  }
  EXPECT_TRUE(engine.response(only).empty());
}

TEST(Scheduler, KeepsATrunkForLaterGroups) {
  std::mt19937 random(3);
  const std::vector<int32_t> trunk = random_tokens(random, kPageTokens);
  PaperEngine engine({.max_num_seqs = 2}, 100);
  for (int32_t row = 0; row < 6; ++row) engine.add(join(trunk, {row}), 2, 10);
  engine.run();
  EXPECT_EQ(engine.num_prompt_tokens, kPageTokens + 6);
}

// --- what a pass computes ---

TEST(Scheduler, DecodesGoBeforeChunks) {
  std::mt19937 random(12);
  PaperEngine engine({.max_num_batched_tokens = 10}, 100);
  engine.add(GroupRequest{.prompt = {1}, .n = 4, .max_new = 50, .ignore_eos = true});
  engine.step();
  engine.step();
  engine.add(random_tokens(random, 100), 1, 5);
  for (int32_t pass = 0; pass < 10; ++pass) {
    engine.step();
    EXPECT_EQ(engine.pass.num_decode_runs, 4);
    EXPECT_EQ(engine.pass.num_prompt_tokens, 6);
  }
  engine.run();
}

TEST(Scheduler, ALongPromptTakesItsShareOnly) {
  std::mt19937 random(13);
  PaperEngine engine({.max_num_batched_tokens = 100, .long_prefill_token_threshold = 40}, 100);
  engine.add(random_tokens(random, 200), 1, 5);
  engine.add(random_tokens(random, 50), 1, 5);
  engine.step();
  ASSERT_EQ(engine.pass.runs.size(), 2u);
  EXPECT_EQ(engine.pass.runs[0].num_tokens, 40);
  EXPECT_EQ(engine.pass.runs[1].num_tokens, 40);
  engine.run();
}

TEST(Scheduler, PromptsAreComputedEverySoManyPasses) {
  std::mt19937 random(14);
  PaperEngine engine({.max_num_batched_tokens = 20, .prefill_schedule_interval = 3}, 100);
  engine.add(GroupRequest{.prompt = {1}, .max_new = 60, .ignore_eos = true});
  engine.step();
  engine.step();
  engine.add(random_tokens(random, 100), 1, 5);
  int32_t with_prompt = 0;
  for (int32_t pass = 0; pass < 9; ++pass) {
    engine.step();
    with_prompt += engine.pass.num_prompt_tokens > 0;
  }
  EXPECT_EQ(with_prompt, 3);
  engine.run();
}

TEST(Scheduler, WholePromptsWithoutChunking) {
  std::mt19937 random(6);
  PaperEngine engine({.max_num_batched_tokens = 100, .chunked_prefill = false}, 200);
  for (int32_t row = 0; row < 5; ++row) engine.add(random_tokens(random, 90), 3, 20);
  engine.run();
  EXPECT_EQ(engine.num_prompt_tokens, 5 * 90);
}

TEST(Scheduler, DecodesDoNotStarveAWholePrompt) {
  std::mt19937 random(15);
  PaperEngine engine({.max_num_batched_tokens = 100, .chunked_prefill = false}, 200);
  engine.add(GroupRequest{.prompt = {1}, .max_new = 500, .ignore_eos = true});
  engine.step();
  engine.step();
  const int32_t long_prompt = engine.add(random_tokens(random, 100), 1, 5);
  for (int32_t pass = 0; pass < 5; ++pass) {
    engine.step();
    EXPECT_EQ(engine.pass.num_prompt_tokens, 0) << "no room beside the decode";
  }
  engine.time() += 2.0;
  engine.step();
  EXPECT_EQ(engine.pass.num_prompt_tokens, 100);
  engine.run();
  engine.check_responses(long_prompt);
}

}  // namespace
}  // namespace banyan::rollout
