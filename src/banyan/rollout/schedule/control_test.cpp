// What happens to everything at once: new weights, resets, retraction, sleep, failed passes; and
// the regression cases of the rollout specification (section 12) that the schedule decides.
#include <gtest/gtest.h>

#include "banyan/rollout/schedule/paper_engine.h"

namespace banyan::rollout {
namespace {

GroupRequest endless(std::vector<int32_t> prompt, int32_t n, int32_t max_new) {
  return {.prompt = std::move(prompt), .n = n, .max_new = max_new, .ignore_eos = true};
}

// NVIDIA-NeMo/RL#4018, InternLM/lmdeploy#4917, vllm-project/vllm#9744: a cache used across updates.
TEST(Regression, no_stale_prefix_after_update) {
  std::mt19937 random(1);
  const std::vector<int32_t> prompt = random_tokens(random, 150);
  for (const bool keep : {false, true}) {
    PaperEngine engine({}, 100);
    engine.add(prompt, 2, 50);
    engine.run();
    EXPECT_GT(engine.scheduler().num_cached_pages(), 0);
    engine.scheduler().new_epoch(keep);
    EXPECT_EQ(engine.scheduler().num_cached_pages(), 0) << "freed at once";
    engine.check_books();
    const int64_t before = engine.num_prompt_tokens;
    const int32_t again = engine.add(prompt, 2, 50);
    engine.run();  // the paper engine fails on a position of an older epoch
    EXPECT_EQ(engine.num_prompt_tokens - before, 150);
    EXPECT_EQ(engine.group(again).num_cached, 0) << "hits say what was found";
  }
}

TEST(Scheduler, NewWeightsUnderLoadFindNothingOld) {
  std::mt19937 random(2);
  const std::vector<int32_t> trunk = random_tokens(random, 70);
  for (const bool keep : {false, true}) {
    PaperEngine engine({.max_num_seqs = 6}, 40);
    for (int32_t i = 0; i < 6; ++i) {
      std::vector<int32_t> prompt = trunk;
      prompt.push_back(i);
      engine.add(endless(prompt, 2, 100));
    }
    for (int32_t pass = 0; pass < 30; ++pass) engine.step();
    engine.scheduler().new_epoch(keep);
    engine.check_books();
    for (int32_t id = 0; id < 6; ++id) {
      EXPECT_EQ(engine.group(id).tainted,
                keep && engine.group(id).num_in(SequenceState::kRunning) > 0);
    }
    for (int32_t pass = 0; pass < 30; ++pass) engine.step();
    std::vector<int32_t> prompt = trunk;
    prompt.push_back(77);
    engine.add(endless(prompt, 2, 10));
    engine.run();
    EXPECT_EQ(engine.scheduler().epoch(), 1);
  }
}

TEST(Scheduler, ATaintedResponsePublishesNothing) {
  std::mt19937 random(3);
  const std::vector<int32_t> prompt = random_tokens(random, 64);
  PaperEngine engine({}, 100);
  const int32_t id = engine.add(endless(prompt, 2, 300));
  for (int32_t pass = 0; pass < 100; ++pass) engine.step();
  engine.scheduler().new_epoch(/*keep=*/true);
  EXPECT_TRUE(engine.group(id).tainted);
  EXPECT_EQ(engine.scheduler().num_running(), 2) << "it goes on";
  engine.run();
  EXPECT_EQ(engine.scheduler().num_cached_pages(), 0) << "and leaves nothing";
  engine.check_responses(id);
  EXPECT_EQ(engine.group(id).sequences[0].num_retractions, 0);
}

TEST(Scheduler, ATaintedGroupThatLostEverythingIsCleanAgain) {
  std::mt19937 random(4);
  PaperEngine engine({}, 100);
  const int32_t id = engine.add(endless(random_tokens(random, 64), 2, 200));
  for (int32_t pass = 0; pass < 100; ++pass) engine.step();
  engine.scheduler().new_epoch(/*keep=*/true);
  engine.step();
  engine.scheduler().retract_all();
  engine.step();
  EXPECT_FALSE(engine.group(id).tainted);
  engine.run();
  EXPECT_GT(engine.scheduler().num_cached_pages(), 0);
  engine.check_responses(id);
}

// vllm-project/vllm#55227: a prefix that two requests seemed to share because a page had several
// holders. Pages are shared only where the tokens before are the same, whoever holds them.
TEST(Regression, prefix_identity_not_refcount) {
  std::mt19937 random(5);
  PaperEngine engine({}, 200);
  const std::vector<int32_t> one = random_tokens(random, 128);
  const std::vector<int32_t> other = random_tokens(random, 128);
  engine.add(one, 1, 5);
  engine.run();  // `one` stays in the cache: its pages get two holders as soon as it runs again
  engine.add(endless(one, 3, 100));
  engine.add(endless(other, 3, 100));
  engine.add(endless(one, 3, 100));
  std::vector<int32_t> opened = one;  // the same second page under another first one
  opened[0] = (opened[0] + 1) % kPaperVocab;
  engine.add(endless(opened, 3, 100));
  int64_t shared = 0;
  const auto tokens_of = [&](const rollout::Run& run, int32_t end) {
    const Group& g = engine.group(run.group);
    std::vector<int32_t> tokens = g.prompt();
    if (run.child != kTrunk) {
      const std::vector<int32_t>& response = g.sequences[run.child].response;
      tokens.insert(tokens.end(), response.begin(), response.end());
    }
    tokens.resize(std::min(end, static_cast<int32_t>(tokens.size())));
    return tokens;
  };
  engine.before_draws = [&] {
    for (const rollout::Run& a : engine.pass.runs) {
      for (const rollout::Run& b : engine.pass.runs) {
        const std::span<const int32_t> pages_a = engine.scheduler().pages_of(a);
        const std::span<const int32_t> pages_b = engine.scheduler().pages_of(b);
        for (size_t i = 0; i < std::min(pages_a.size(), pages_b.size()); ++i) {
          const int32_t end = std::min(static_cast<int32_t>(i + 1) * kPageTokens,
                                       std::min(a.first_position, b.first_position));
          if (pages_a[i] != pages_b[i]) continue;
          ASSERT_EQ(tokens_of(a, end), tokens_of(b, end)) << "unrelated runs share page " << i;
          shared += a.group != b.group;
        }
      }
    }
  };
  engine.run();
  EXPECT_GT(shared, 0) << "related ones do";
}

// vllm-project/vllm#22197, sgl-project/sglang#11673: tokens lost on abort.
TEST(Scheduler, AnAbortKeepsTheTokens) {
  std::mt19937 random(6);
  PaperEngine engine({.max_num_seqs = 4}, 24);
  const int32_t running = engine.add(endless(random_tokens(random, 30), 2, 200));
  const int32_t retracted = engine.add(endless(random_tokens(random, 30), 2, 200));
  const int32_t queued = engine.add(endless(random_tokens(random, 30), 2, 200));
  for (int32_t pass = 0; pass < 40; ++pass) engine.step();
  engine.scheduler().retract_all();
  engine.step();  // seats for the senior first
  ASSERT_GT(engine.response(running).size(), 10u);
  ASSERT_GT(engine.response(retracted).size(), 10u);
  std::vector<std::vector<int32_t>> before;
  for (const int32_t id : {running, retracted, queued}) {
    for (int32_t child = 0; child < 2; ++child) before.push_back(engine.response(id, child));
  }
  size_t i = 0;
  for (const int32_t id : {running, retracted, queued}) {
    for (int32_t child = 0; child < 2; ++child) {
      engine.abort(id, child);
      engine.abort(id, child);  // again: no effect
      EXPECT_EQ(engine.response(id, child), before[i++]) << "the tokens are still there";
    }
    engine.check_responses(id);
  }
  EXPECT_TRUE(engine.scheduler().idle());
  EXPECT_EQ(engine.scheduler().num_used_pages(), 0);
}

// areal-project/AReaL#140, sgl-project/sglang#12099, #32153: an update under load must succeed with
// requests queued, running, retracted, half prefilled and in host memory.
TEST(Scheduler, ControlCallsInAnyOrder) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    PaperEngine engine({.max_num_seqs = 8,
                        .max_num_batched_tokens = 40,
                        .conservativeness = 0.2,
                        .page_bytes = 100,
                        .host_pages = 6},
                       16);
    engine.scheduler().set_spill_costs({.bytes_per_second = 1e6, .seconds_per_token = 1.0});
    std::vector<int32_t> ids;
    for (int32_t pass = 0; pass < 150; ++pass) {
      if (random() % 8 == 0) {
        ids.push_back(engine.add(endless(
            random_tokens(random, 1 + random() % 200), 1 + random() % 3, 1 + random() % 300)));
      }
      switch (random() % 16) {
        case 0:
          engine.scheduler().new_epoch(/*keep=*/false);
          break;
        case 1:
          engine.scheduler().new_epoch(/*keep=*/true);
          break;
        case 2:
          engine.scheduler().reset_cache(/*retract=*/random() % 2 == 0);
          break;
        case 3:
          engine.scheduler().retract_all();
          break;
        case 4:
          if (!ids.empty()) engine.drop(ids[random() % ids.size()]);
          break;
        case 5:
          engine.fail_pass(random() % 4);
          break;
        default:
          break;
      }
      engine.check_books();
      engine.step();
      if (testing::Test::HasFatalFailure()) return;
    }
    engine.run();
    for (const int32_t id : ids) engine.check_responses(id);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Scheduler, ATaintedResponseDoesNotComeBackFromHostMemoryAsAClean) {
  std::mt19937 random(10);
  PaperEngine engine({.conservativeness = 0.01, .page_bytes = 1, .host_pages = 30}, 11);
  engine.never_stops = true;
  engine.scheduler().set_spill_costs({.bytes_per_second = 1e9, .seconds_per_token = 1.0});
  const int32_t senior = engine.add(random_tokens(random, 100), 1, 500);
  const int32_t junior = engine.add(random_tokens(random, 200), 1, 200);
  for (int32_t pass = 0; pass < 60; ++pass) engine.step();
  engine.scheduler().new_epoch(/*keep=*/true);
  bool spilled = false;
  while (engine.group(junior).num_held > 0) {
    ASSERT_TRUE(engine.step());
    spilled |= !engine.group(junior).sequences[0].host.empty();
  }
  EXPECT_TRUE(spilled) << "then its trunk is needed too";
  engine.run();
  EXPECT_FALSE(engine.group(junior).tainted);
  EXPECT_EQ(engine.scheduler().counters().restored_pages, 0);
  for (const int32_t id : {senior, junior}) engine.check_responses(id);
}

TEST(Scheduler, ResetForgetsTheCacheUnderARunningResponse) {
  std::mt19937 random(7);
  const std::vector<int32_t> prompt = random_tokens(random, 100);
  PaperEngine engine({}, 100);
  const int32_t id = engine.add(endless(prompt, 1, 150));
  for (int32_t pass = 0; pass < 60; ++pass) engine.step();
  engine.scheduler().reset_cache(/*retract=*/false);
  EXPECT_EQ(engine.scheduler().num_running(), 1);
  const int64_t before = engine.num_prompt_tokens;
  engine.add(prompt, 1, 5);
  engine.run();
  EXPECT_EQ(engine.num_prompt_tokens - before, 100);
  engine.check_responses(id);
  EXPECT_EQ(engine.group(id).sequences[0].num_retractions, 0);
}

TEST(Scheduler, SleepsAndWakesWithAnotherPool) {
  std::mt19937 random(8);
  PaperEngine engine({}, 20);
  const int32_t large = engine.add(endless(random_tokens(random, 100), 1, 600));
  const int32_t small = engine.add(endless(random_tokens(random, 100), 1, 50));
  for (int32_t pass = 0; pass < 20; ++pass) engine.step();
  EXPECT_TRUE(engine.set_num_pages(0).empty());
  EXPECT_FALSE(engine.step()) << "asleep";
  const int32_t queued = engine.add(endless({1}, 1, 5));
  EXPECT_EQ(engine.set_num_pages(10), std::vector<int32_t>{large}) << "too large for what is left";
  engine.drop(large);
  engine.run();
  for (const int32_t id : {large, small, queued}) engine.check_responses(id);
}

TEST(Scheduler, AFailedPassCountsForNothing) {
  std::mt19937 random(9);
  const std::vector<int32_t> trunk = random_tokens(random, 150);
  PaperEngine engine({.max_num_batched_tokens = 100}, 60);
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 4; ++i) {
    std::vector<int32_t> prompt = trunk;
    for (int32_t t = 0; t < 30; ++t) prompt.push_back(i);
    ids.push_back(engine.add(endless(prompt, 3, 100)));
  }
  for (int32_t pass = 0; pass < 60; ++pass) {
    engine.fail_pass(random() % 4);
    engine.step();
    if (testing::Test::HasFatalFailure()) return;
  }
  engine.run();
  for (const int32_t id : ids) engine.check_responses(id);
  EXPECT_EQ(engine.scheduler().counters().prompt_tokens, 4 * 180) << "counted once";
}

TEST(Scheduler, ACopyOfAFailedPassIsNotCountedOn) {
  std::mt19937 random(11);
  std::vector<int32_t> prompt = random_tokens(random, 100);
  PaperEngine engine({}, 60);
  engine.add(prompt, 1, 5);
  engine.run();
  prompt[90] = (prompt[90] + 1) % kPaperVocab;
  const int32_t id = engine.add(prompt, 2, 5);
  engine.fail_pass(/*num_copies=*/0);
  EXPECT_FALSE(engine.group(id).drawn);
  engine.run();
  engine.check_responses(id);
}

}  // namespace
}  // namespace banyan::rollout
