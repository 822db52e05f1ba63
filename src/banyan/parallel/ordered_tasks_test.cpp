// Tasks run in their order, on the caller's thread or on one of their own; an error ends them.
#include "banyan/parallel/ordered_tasks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace banyan::parallel {
namespace {

TEST(OrderedTasks, RunInTheirOrderAndWaitShowsWhatTheyDid) {
  for (const bool threaded : {false, true}) {
    std::vector<int64_t> done;  // read only behind a wait for what wrote it
    OrderedTasks tasks(threaded);
    for (int64_t i = 1; i <= 200; ++i) {
      ASSERT_EQ(tasks.add([&done, i] { done.push_back(i); }), i);
      if (i % 3 != 0) continue;
      tasks.wait(i);
      ASSERT_EQ(done.size(), static_cast<size_t>(i));
    }
    tasks.drain();
    for (int64_t i = 0; i < 200; ++i) ASSERT_EQ(done[i], i + 1);
  }
}

TEST(OrderedTasks, TheFirstErrorIsThrownAndNoTaskRunsBehindIt) {
  for (const bool threaded : {false, true}) {
    int64_t ran = 0;
    OrderedTasks tasks(threaded);
    const auto all = [&] {
      tasks.add([&] { ++ran; });
      tasks.add([] { throw std::runtime_error("broken"); });
      tasks.add([&] { ++ran; });
      tasks.drain();
    };
    EXPECT_THROW(all(), std::runtime_error);
    if (threaded) {
      EXPECT_THROW(tasks.drain(), std::runtime_error);
    }
    EXPECT_EQ(ran, 1);
  }
}

TEST(OrderedTasks, TheEndWaitsForTheTaskInProgress) {
  std::atomic<bool> begun = false;
  bool ended = false;
  {
    OrderedTasks tasks(/*threaded=*/true);
    tasks.add([&] {
      begun = true;
      begun.notify_all();
      ended = true;
    });
    begun.wait(false);
  }
  EXPECT_TRUE(ended);
}

}  // namespace
}  // namespace banyan::parallel
