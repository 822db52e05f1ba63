#include "banyan/rollout/control/boundary.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <thread>
#include <vector>

namespace banyan::rollout {
namespace {

TEST(Boundary, AControlCallWaitsForOnePassAtMost) {
  Boundary boundary;
  std::atomic<bool> stop{false};
  std::atomic<int> passes{0};
  std::thread loop([&] {
    while (!stop) {
      const Boundary::Hold held = boundary.enter_pass();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ++passes;
    }
  });
  for (int i = 0; i < 20; ++i) {
    const int before = passes;
    const auto held = boundary.enter(Deadline(5.0));
    ASSERT_TRUE(held.has_value());
    EXPECT_LE(passes - before, 2);
  }
  stop = true;
  loop.join();
}

TEST(Boundary, AControlCallGivesUpAtItsDeadline) {
  Boundary boundary;
  auto pass = std::make_optional(boundary.enter_pass());
  EXPECT_FALSE(boundary.enter(Deadline(0.01)).has_value());
  EXPECT_FALSE(boundary.enter(Deadline(-1.0)).has_value());
  pass.reset();
  EXPECT_TRUE(boundary.enter(Deadline(0.0)).has_value());
}

TEST(Boundary, OneAtATime) {
  Boundary boundary;
  int count = 0;  // guarded by the boundary alone
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        if (t == 0) {
          const Boundary::Hold held = boundary.enter_pass();
          ++count;
        } else {
          const auto held = boundary.enter(Deadline(60.0));
          ++count;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, 8000);
}

TEST(Boundary, ADeadlineTakesAnyNumber) {
  EXPECT_TRUE(Deadline(-5.0).passed());
  EXPECT_TRUE(Deadline(std::nan("")).passed());
  EXPECT_FALSE(Deadline(1e300).passed());
}

}  // namespace
}  // namespace banyan::rollout
