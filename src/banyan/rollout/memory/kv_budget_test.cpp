#include "banyan/rollout/memory/kv_budget.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace banyan::rollout {
namespace {

constexpr MemoryReading kMachine{.total = 1000, .free = 900, .resident = 200};

TEST(KvBudget, BytesDecideAlone) {
  EXPECT_EQ(kv_budget_bytes({.kv_bytes = 5000, .memory_share = 0.1}, kMachine, true), 5000);
}

TEST(KvBudget, AShareOfWhatTheProcessDoesNotUseYet) {
  EXPECT_EQ(kv_budget_bytes({.memory_share = 0.5, .weight_bytes = 300}, kMachine, true), 400);
  EXPECT_EQ(kv_budget_bytes({.memory_share = 1.0}, kMachine, true), 800);
  const MemoryReading busy{.total = 1000, .free = 100, .resident = 200};
  EXPECT_EQ(kv_budget_bytes({.memory_share = 0.5}, busy, true), 90) << "others use the machine";
}

TEST(KvBudget, OnAnAcceleratorWeightsAreInTheShare) {
  EXPECT_EQ(kv_budget_bytes({.memory_share = 0.5, .weight_bytes = 300}, kMachine, false), 200);
}

TEST(KvBudget, TheStaticFractionHoldsWeightsAndKv) {
  const KvBudget budget{.memory_share = 0.1, .mem_fraction_static = 0.8, .weight_bytes = 300};
  EXPECT_EQ(kv_budget_bytes(budget, kMachine, true), 500);
  EXPECT_EQ(kv_budget_bytes(budget, kMachine, false), 500);
}

TEST(KvBudget, AShareThatTheWeightsFillIsRefused) {
  try {
    kv_budget_bytes({.mem_fraction_static = 0.3, .weight_bytes = 300}, kMachine, true);
    ADD_FAILURE() << "no error";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what())
                  .find("[rollout] mem_fraction_static: wanted a share that leaves room for keys "
                        "and values, got 0.3 of 1000 bytes with 300 of weights"),
              std::string::npos)
        << error.what();
  }
}

TEST(KvBudget, TakesWhatTheCallNeedsWithinTheBudget) {
  const auto pages = [](int64_t wanted, int64_t kv_bytes) {
    return pool_pages(wanted, /*page_bytes=*/1000, {.kv_bytes = kv_bytes}, at::kCPU);
  };
  EXPECT_EQ(pages(7, 100000), 7);
  EXPECT_EQ(pages(7, 6999), 6);
  EXPECT_EQ(pages(7, 999), 0);
}

TEST(KvBudget, ReadsTheMachine) {
  const MemoryReading memory = read_memory(at::kCPU);
  EXPECT_GT(memory.total, 0);
  EXPECT_GT(memory.free, 0);
  EXPECT_GT(memory.resident, 0);
  EXPECT_LE(memory.free, memory.total);
  const int64_t page_bytes = 1 << 20;
  const int64_t got = pool_pages(int64_t{1} << 40, page_bytes, {.memory_share = 0.25}, at::kCPU);
  const double wanted = 0.25 * static_cast<double>(memory.total - memory.resident);
  EXPECT_LE(static_cast<double>(got * page_bytes), 1.05 * wanted);
  EXPECT_GT(got, 0);
  EXPECT_EQ(pool_pages(1, page_bytes, {.memory_share = 0.25}, at::kCPU), 1);
}

}  // namespace
}  // namespace banyan::rollout
