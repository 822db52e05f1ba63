#include "banyan/rollout/kv_budget.h"

#include <gtest/gtest.h>

namespace banyan::rollout {
namespace {

TEST(KvBudget, TakesWhatTheCallNeedsWithinTheBudget) {
  const auto pages = [](int64_t wanted, int64_t kv_bytes) {
    return pool_pages(wanted, /*page_bytes=*/1000, kv_bytes, /*memory_share=*/0.5, at::kCPU);
  };
  EXPECT_EQ(pages(7, 100000), 7);
  EXPECT_EQ(pages(7, 6999), 6);
  EXPECT_EQ(pages(7, 999), 0);
}

TEST(KvBudget, WithoutBytesItIsAShareOfTheFreeMemory) {
  const int64_t free_bytes = free_memory_bytes(at::kCPU);
  ASSERT_GT(free_bytes, 0);
  const int64_t page_bytes = 1 << 20;
  const int32_t half = pool_pages(int64_t{1} << 40, page_bytes, 0, 0.5, at::kCPU);
  EXPECT_GT(half, 0);
  EXPECT_NEAR(static_cast<double>(half) * page_bytes,
              0.5 * static_cast<double>(free_bytes),
              0.25 * static_cast<double>(free_bytes));
  EXPECT_EQ(pool_pages(1, page_bytes, 0, 0.5, at::kCPU), 1);
}

}  // namespace
}  // namespace banyan::rollout
