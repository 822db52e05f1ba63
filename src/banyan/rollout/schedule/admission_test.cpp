// Who starts, and in which order: one test per rule, on the paper engine.
#include <gtest/gtest.h>

#include "banyan/rollout/schedule/paper_engine.h"
#include "banyan/rollout/schedule/scheduler.h"

namespace banyan::rollout {
namespace {

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

}  // namespace
}  // namespace banyan::rollout
