#include "banyan/rollout/control/boundary.h"

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <thread>
#include <vector>

namespace banyan::rollout {
namespace {

TEST(Boundary, AControlCallWaitsForOnePassAtMost) {
  Boundary boundary;
  std::vector<char> order;  // guarded by the boundary
  for (int i = 0; i < 20; ++i) {
    auto pass = std::make_optional(boundary.enter_pass());
    std::thread control([&] {
      const auto held = boundary.enter(Deadline(60.0));
      EXPECT_TRUE(held.has_value());
      order.push_back('c');
    });
    while (boundary.num_waiting() == 0) std::this_thread::yield();
    std::thread next([&] {
      const Boundary::Hold held = boundary.enter_pass();
      order.push_back('p');
    });
    pass.reset();
    control.join();
    next.join();
  }
  for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], i % 2 == 0 ? 'c' : 'p');
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
