#include "banyan/rollout/memory/page_pool.h"

#include <gtest/gtest.h>

#include <random>
#include <stdexcept>

namespace banyan::rollout {
namespace {

TEST(PagePool, CountsHoldersAndReusesPages) {
  PagePool pool(2);
  const int32_t first = pool.take();
  const int32_t second = pool.take();
  EXPECT_NE(first, second);
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_THROW(pool.take(), std::logic_error);
  pool.share(first);
  pool.release(first);
  EXPECT_EQ(pool.num_free(), 0);
  pool.release(first);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_THROW(pool.release(first), std::logic_error);
  EXPECT_THROW(pool.share(first), std::logic_error);
  EXPECT_EQ(pool.take(), first);
}

TEST(PagePool, NeverLosesAPage) {
  std::mt19937 random(7);
  PagePool pool(16);
  std::vector<int32_t> holds;
  for (int step = 0; step < 10000; ++step) {
    const uint32_t choice = random() % 3;
    if (choice == 0 && pool.num_free() > 0) {
      holds.push_back(pool.take());
    } else if (choice == 1 && !holds.empty()) {
      holds.push_back(holds[random() % holds.size()]);
      pool.share(holds.back());
    } else if (!holds.empty()) {
      std::swap(holds[random() % holds.size()], holds.back());
      pool.release(holds.back());
      holds.pop_back();
    }
    int32_t total = 0;
    int32_t in_use = 0;
    for (int32_t page = 0; page < pool.num_pages(); ++page) {
      total += pool.holders(page);
      in_use += pool.holders(page) > 0;
    }
    ASSERT_EQ(total, static_cast<int32_t>(holds.size()));
    ASSERT_EQ(in_use + pool.num_free(), pool.num_pages());
  }
}

TEST(PagesFor, RoundsUp) {
  EXPECT_EQ(pages_for(0), 0);
  EXPECT_EQ(pages_for(1), 1);
  EXPECT_EQ(pages_for(kPageTokens), 1);
  EXPECT_EQ(pages_for(kPageTokens + 1), 2);
}

}  // namespace
}  // namespace banyan::rollout
