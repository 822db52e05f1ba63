// One test per rule of the schedule, on the paper engine.
#include "banyan/rollout/schedule/scheduler.h"

#include <gtest/gtest.h>

#include "banyan/rollout/schedule/paper_engine.h"

namespace banyan::rollout {
namespace {

std::vector<int32_t> join(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

template <typename F>
RequestError refusal(F&& act) {
  try {
    act();
  } catch (const RequestError& error) {
    return error;
  }
  ADD_FAILURE() << "no refusal";
  return RequestError(0, "", "");
}

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

// --- admission ---

TEST(Scheduler, UsesTheSeatsThereAre) {
  std::mt19937 random(4);
  PaperEngine engine({.max_num_seqs = 64}, 1000);
  for (int32_t row = 0; row < 8; ++row) engine.add(random_tokens(random, 30), 8, 40);
  engine.run();
  EXPECT_GT(engine.max_running, 50);
  EXPECT_LE(engine.num_passes, 41);
}

TEST(Scheduler, AGroupThatCanNeverFitIsRefused) {
  PaperEngine engine({.page_bytes = 1000}, 10);
  const RequestError error = refusal([&] { engine.add(std::vector<int32_t>(100, 1), 1, 1000); });
  EXPECT_EQ(error.code, 400);
  EXPECT_EQ(error.param, "max_tokens");
  EXPECT_STREQ(error.what(),
               "[rollout] kv pool: a prompt of 100 tokens with 1000 new ones can never fit: wanted "
               "19000 bytes, got a pool of 10000 bytes; raise kv_cache_memory_bytes (or "
               "gpu_memory_utilization) or lower the number of new tokens (max_tokens, "
               "response_length)");
  // The refusal holds while the pool is asleep.
  engine.set_num_pages(0);
  EXPECT_EQ(refusal([&] { engine.add(std::vector<int32_t>(100, 1), 1, 1000); }).code, 400);
  PaperEngine whole({.max_num_batched_tokens = 50, .chunked_prefill = false}, 10);
  EXPECT_EQ(refusal([&] { whole.add(std::vector<int32_t>(51, 1), 1, 1); }).param, "prompt");
}

TEST(Scheduler, LearnsHowFastGroupsEnd) {
  PaperEngine engine({.max_num_seqs = 1}, 100);
  for (int32_t i = 0; i < 40; ++i) engine.add({i}, 1, 1);
  EXPECT_EQ(engine.scheduler().seconds_per_group(), 0.0);
  while (engine.step()) engine.time() += 7.0;
  EXPECT_NEAR(engine.scheduler().seconds_per_group(), 7.0, 1e-9);
}

TEST(Scheduler, ReservesWhatResponsesAreExpectedToNeed) {
  // 20 pages; a response of at most 640 tokens is expected to take 0.7 of them: 7 pages.
  const auto running = [](double conservativeness, bool ignore_eos, double watermark) {
    PaperEngine engine({.watermark = watermark, .conservativeness = conservativeness}, 20);
    for (int32_t i = 0; i < 10; ++i) {
      engine.add(GroupRequest{.prompt = {10 + i}, .max_new = 600, .ignore_eos = ignore_eos});
    }
    engine.step();
    engine.step();
    return engine.scheduler().num_running();
  };
  EXPECT_EQ(running(1.0, false, 0.0), 2);
  EXPECT_EQ(running(0.5, false, 0.0), 4);
  EXPECT_EQ(running(0.1, false, 0.0), 10) << "the floor: a tenth of max_tokens is one page";
  EXPECT_EQ(running(1.0, true, 0.0), 1) << "ignore_eos: every token will come";
  EXPECT_EQ(running(1.0, false, 0.5), 1) << "half of the pages are kept free";
}

TEST(Scheduler, LearnsHowLongResponsesAre) {
  PaperEngine engine({}, 20);
  Scheduler& scheduler = engine.scheduler();
  // Ten short responses of one source: then many fit, of that source only.
  for (int32_t i = 0; i < 10; ++i) {
    const int32_t id =
        engine.add(GroupRequest{.prompt = {i}, .max_new = 3, .ignore_eos = true, .source = "a"});
    engine.run();
    engine.forget(id);
  }
  const auto start = [&](const std::string& source) {
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < 9; ++i) {
      ids.push_back(
          engine.add(GroupRequest{.prompt = {100 + i}, .max_new = 600, .source = source}));
    }
    engine.step();
    engine.step();
    const int32_t running = scheduler.num_running();
    for (const int32_t id : ids) engine.drop(id);
    return running;
  };
  EXPECT_EQ(start("a"), 9);
  EXPECT_EQ(start("b"), 2);
  EXPECT_EQ(start("b"), 2) << "nothing is learned from responses that were cut off";
}

TEST(Scheduler, AGroupIsAdmittedAsAWhole) {
  // Two pages a response; the first group leaves 3 of 12: the second, of 3 responses, waits, though
  // one of its responses would fit. Response by response it does not wait.
  const auto running = [](SchedulingPolicy policy) {
    PaperEngine engine({.policy = policy}, 12);
    const auto group = [](int32_t token, int32_t n) {
      return GroupRequest{
          .prompt = std::vector<int32_t>(64, token), .n = n, .max_new = 100, .ignore_eos = true};
    };
    engine.add(group(1, 4));
    engine.add(group(2, 3));
    engine.step();
    engine.step();
    engine.step();
    return engine.scheduler().num_running();
  };
  EXPECT_EQ(running(SchedulingPolicy::kGroup), 4);
  EXPECT_EQ(running(SchedulingPolicy::kFcfs), 5);
}

TEST(Scheduler, AHeadThatDoesNotFitIsPassedForTwoSecondsOnly) {
  const auto group = [](int32_t token, int32_t max_new) {
    return GroupRequest{.prompt = {token}, .max_new = max_new, .ignore_eos = true};
  };
  for (const auto policy : {SchedulingPolicy::kGroup, SchedulingPolicy::kFcfs}) {
    PaperEngine engine({.policy = policy}, 12);
    engine.add(group(1, 320));  // 5 of 12 pages, and its tail
    engine.step();
    engine.step();
    const int32_t head = engine.add(group(2, 600));
    const int32_t small = engine.add(group(3, 60));
    engine.step();
    EXPECT_LT(engine.group(head).seniority, 0);
    EXPECT_EQ(engine.group(small).seniority >= 0, policy == SchedulingPolicy::kGroup);
    engine.time() += 2.0;
    const int32_t late = engine.add(group(4, 60));
    engine.step();
    EXPECT_LT(engine.group(late).seniority, 0) << "the head has waited long enough";
    engine.run();
    EXPECT_LT(engine.group(head).seniority, engine.group(late).seniority);
  }
}

// --- requests with a group_id ---

GroupRequest member(int32_t token, const std::string& group_id, int32_t max_new) {
  return {.prompt = {token}, .max_new = max_new, .ignore_eos = true, .group_id = group_id};
}

std::vector<int32_t> ids_in_order_of_end(const PaperEngine& engine) {
  std::vector<int32_t> ids;
  for (const auto& [id, child] : engine.ended) ids.push_back(id);
  return ids;
}

TEST(Units, MembersHaveOnePlaceInTheQueue) {
  const auto order = [](SchedulingPolicy policy, double later) {
    PaperEngine engine({.max_num_seqs = 1, .policy = policy}, 100);
    engine.add(member(0, "a", 2));
    engine.add(member(1, "", 2));
    engine.add(member(2, "b", 2));
    engine.time() += later;
    engine.add(member(3, "a", 2));
    engine.add(member(4, "b", 2));
    engine.run();
    return ids_in_order_of_end(engine);
  };
  EXPECT_EQ(order(SchedulingPolicy::kGroup, 0.0), (std::vector<int32_t>{0, 3, 1, 2, 4}));
  EXPECT_EQ(order(SchedulingPolicy::kGroup, 1.9), (std::vector<int32_t>{0, 3, 1, 2, 4}));
  // Who comes later is a unit of its own: nobody keeps a place for good.
  EXPECT_EQ(order(SchedulingPolicy::kGroup, 2.1), (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(order(SchedulingPolicy::kFcfs, 0.0), (std::vector<int32_t>{0, 1, 2, 3, 4}));
}

TEST(Units, MembersAreAdmittedTogether) {
  // Sixteen pages, eleven and a tail for what runs: one member of three pages and a tail fits
  // beside it, two do not. Half the pool would hold both, so neither starts.
  const auto running = [](const std::string& first, const std::string& second) {
    PaperEngine engine({}, 16);
    engine.add(member(1, "", 64 * 11));
    engine.step();
    engine.step();
    engine.add(member(2, first, 64 * 3));
    engine.add(member(3, second, 64 * 3));
    engine.step();
    engine.step();
    const int32_t count = engine.scheduler().num_running();
    engine.run();
    return count;
  };
  EXPECT_EQ(running("", ""), 2);
  EXPECT_EQ(running("a", "a"), 1);
  EXPECT_EQ(running("a", "b"), 2);
}

TEST(Units, MembersGiveWayTogether) {
  PaperEngine engine({.conservativeness = 0.01}, 100);
  const int32_t a = engine.add(member(1, "a", 100));
  const int32_t other = engine.add(member(2, "", 100));
  engine.step();
  const int32_t later = engine.add(member(3, "a", 100));
  engine.step();
  EXPECT_LT(engine.group(other).seniority, engine.group(later).seniority);
  EXPECT_EQ(engine.group(later).lead(), engine.group(a).lead());
  EXPECT_LT(engine.group(later).lead(), engine.group(other).lead());
  engine.run();
}

TEST(Units, AreForgottenWithTheirLastMember) {
  PaperEngine engine({.max_num_seqs = 1}, 100);
  const int32_t first = engine.add(member(1, "a", 2));
  const int32_t second = engine.add(member(2, "a", 2));
  engine.abort(second, 0);  // in the queue
  engine.run();
  engine.forget(first);
  engine.forget(second);
  const int32_t other = engine.add(member(3, "", 2));
  const int32_t again = engine.add(member(4, "a", 2));
  engine.run();
  EXPECT_LT(engine.group(other).seniority, engine.group(again).seniority);
}

TEST(Scheduler, FcfsAndPriorityOrders) {
  const auto order = [](SchedulingPolicy policy) {
    PaperEngine engine({.max_num_seqs = 1, .policy = policy}, 100);
    for (const int32_t priority : {5, 1, 9, 1, 0}) {
      engine.add(GroupRequest{
          .prompt = {priority}, .max_new = 2, .ignore_eos = true, .priority = priority});
    }
    engine.run();
    std::vector<int32_t> ids;
    for (const auto& [id, child] : engine.ended) ids.push_back(id);
    return ids;
  };
  EXPECT_EQ(order(SchedulingPolicy::kFcfs), (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(order(SchedulingPolicy::kGroup), (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(order(SchedulingPolicy::kPriority), (std::vector<int32_t>{4, 1, 3, 0, 2}));
}

TEST(Scheduler, AClosedQueueStartsWithTheLongest) {
  PaperEngine engine({.max_num_seqs = 1}, 100);
  engine.scheduler().close_queue(true);
  for (const int32_t max_new : {10, 40, 20, 40}) {
    engine.add(GroupRequest{.prompt = {max_new, 7}, .max_new = max_new, .ignore_eos = true});
  }
  engine.run();
  std::vector<int32_t> ids;
  for (const auto& [id, child] : engine.ended) ids.push_back(id);
  EXPECT_EQ(ids, (std::vector<int32_t>{1, 3, 2, 0}));
}

TEST(Scheduler, AClosedQueueKeepsPromptsWithOneTrunkTogether) {
  std::mt19937 random(20);
  const std::vector<int32_t> a = random_tokens(random, 100);
  const std::vector<int32_t> b = random_tokens(random, 100);
  PaperEngine engine({.max_num_seqs = 1}, 4);  // room for one trunk
  engine.scheduler().close_queue(true);
  for (int32_t i = 0; i < 6; ++i) engine.add(join(i % 2 == 0 ? a : b, {i}), 1, 3);
  engine.run();
  std::vector<int32_t> ids;
  for (const auto& [id, child] : engine.ended) ids.push_back(id);
  EXPECT_EQ(ids, (std::vector<int32_t>{0, 2, 4, 1, 3, 5}));
}

TEST(Scheduler, SeatsAreKeptForChildrenWhosePromptIsBeingComputed) {
  PaperEngine engine({.max_num_seqs = 4}, 100);
  engine.add(std::vector<int32_t>(30, 1), 3, 20);
  engine.add(std::vector<int32_t>(30, 2), 3, 20);
  engine.add(std::vector<int32_t>(30, 4), 3, 20);
  engine.step();
  EXPECT_EQ(engine.scheduler().num_groups_started(), 2) << "three seats and one";
  engine.run();
}

TEST(Scheduler, NeighboursInTheTreeAreNeighboursInThePass) {
  std::mt19937 random(11);
  const std::vector<int32_t> a = random_tokens(random, kPageTokens);
  const std::vector<int32_t> b = random_tokens(random, kPageTokens);
  PaperEngine engine({}, 100);
  for (int32_t i = 0; i < 6; ++i) engine.add(join(i % 2 == 0 ? a : b, {i}), 2, 10);
  engine.step();
  engine.step();
  ASSERT_EQ(engine.pass.num_decode_runs, 12);
  int32_t changes = 0;
  for (int32_t r = 1; r < 12; ++r) {
    const Scheduler& scheduler = engine.scheduler();
    changes += scheduler.pages_of(engine.pass.runs[r])[0] !=
               scheduler.pages_of(engine.pass.runs[r - 1])[0];
  }
  EXPECT_EQ(changes, 1);
  engine.run();
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
