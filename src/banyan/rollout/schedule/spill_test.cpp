// Preemption on a device with host memory: what is spilled, comes back, and when it is not.
#include <gtest/gtest.h>

#include "banyan/rollout/schedule/paper_engine.h"

namespace banyan::rollout {
namespace {

constexpr SpillCosts kCheapCopies{.bytes_per_second = 1e9, .seconds_per_token = 1.0};
constexpr SpillCosts kCheapCompute{.bytes_per_second = 1.0, .seconds_per_token = 1e-9};

// Two long responses in a pool that holds one and a half; expectations far too low.
SchedulerCounters run_tight(const SpillCosts& costs, int32_t host_pages) {
  std::mt19937 random(1);
  PaperEngine engine({.share_prefix = false,
                      .conservativeness = 0.01,
                      .page_bytes = 100,
                      .host_pages = host_pages},
                     12);
  engine.never_stops = true;
  engine.scheduler().set_spill_costs(costs);
  for (int32_t i = 0; i < 2; ++i) {
    engine.add(GroupRequest{.prompt = random_tokens(random, 100), .max_new = 450});
  }
  engine.run();
  for (int32_t id = 0; id < 2; ++id) engine.check_responses(id);
  return engine.scheduler().counters();
}

TEST(Spill, PagesComeBackInsteadOfBeingComputedAgain) {
  const SchedulerCounters spilled = run_tight(kCheapCopies, 20);
  EXPECT_GT(spilled.preemptions, 0);
  EXPECT_GT(spilled.spilled_pages, 0);
  EXPECT_EQ(spilled.restored_pages, spilled.spilled_pages);
  EXPECT_EQ(spilled.recomputed_tokens, 0);
}

TEST(Spill, RecomputesWhereThatIsCheaperOrThereIsNoPlace) {
  for (const auto& [costs, host_pages] : {std::pair{kCheapCompute, 20},
                                          std::pair{kCheapCopies, 0},
                                          std::pair{SpillCosts{}, 20},
                                          std::pair{kCheapCopies, 1}}) {
    const SchedulerCounters counters = run_tight(costs, host_pages);
    EXPECT_GT(counters.preemptions, 0);
    EXPECT_EQ(counters.spilled_pages, 0);
    EXPECT_GT(counters.recomputed_tokens, 0);
  }
}

TEST(Spill, SlotsAreFreeAfterAbortRetractionAndNewWeights) {
  for (int32_t how = 0; how < 5; ++how) {
    std::mt19937 random(2);
    PaperEngine engine({.conservativeness = 0.01, .page_bytes = 100, .host_pages = 20}, 12);
    engine.never_stops = true;
    engine.scheduler().set_spill_costs(kCheapCopies);
    for (int32_t i = 0; i < 2; ++i) {
      engine.add(GroupRequest{.prompt = random_tokens(random, 100), .max_new = 450});
    }
    while (engine.scheduler().counters().spilled_pages == 0) ASSERT_TRUE(engine.step());
    ASSERT_LT(engine.scheduler().host().num_free(), 20);
    switch (how) {
      case 0:
        engine.drop(1);
        break;
      case 1:
        engine.scheduler().retract_all();
        break;
      case 2:
        engine.scheduler().new_epoch(/*keep=*/false);
        break;
      case 3:
        engine.set_host_pages(20);
        break;
      default:
        engine.set_num_pages(12);
        break;
    }
    EXPECT_EQ(engine.scheduler().host().num_free(), 20) << how;
    engine.check_books();
    engine.run();
  }
}

}  // namespace
}  // namespace banyan::rollout
