// Teams: every member passes every barrier together, whatever the pool lends, and one failure ends
// all.
#include "banyan/kernels/cpu/team.h"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace banyan::kernels {
namespace {

struct Threads {
  explicit Threads(int count) : before(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before); }
  int before;
};

TEST(Team, WhatIsWrittenBeforeABarrierIsSeenAfterIt) {
  for (const int threads : {1, 2, 4}) {
    const Threads scope(threads);
    constexpr int64_t kPhases = 2000;
    constexpr int64_t kItems = 37;
    std::vector<int64_t> values(kItems, 0);
    std::vector<std::atomic<int64_t>> wrong(1);
    Team::run([&](Team::Member& member) {
      EXPECT_LE(member.size(), threads);
      for (int64_t phase = 0; phase < kPhases; ++phase) {
        for (int64_t i = member.first_of(kItems); i < member.last_of(kItems); ++i) ++values[i];
        member.barrier();
        for (const int64_t value : values) wrong[0] += value != phase + 1;
        member.barrier();
      }
    });
    EXPECT_EQ(wrong[0].load(), 0) << threads;
  }
}

TEST(Team, SharesAndTicketsHandOutEveryItemOnce) {
  for (const int threads : {1, 2, 3}) {
    const Threads scope(threads);
    for (const int64_t count : {0, 1, 2, 7, 100}) {
      std::vector<std::atomic<int>> shares(count), tickets(count);
      Tickets phase;
      Team::run([&](Team::Member& member) {
        for (int64_t i = member.first_of(count); i < member.last_of(count); ++i) ++shares[i];
        for (int64_t i = member.rank(); i < count; i = phase.next(member)) ++tickets[i];
      });
      for (int64_t i = 0; i < count; ++i) {
        EXPECT_EQ(shares[i].load(), 1);
        EXPECT_EQ(tickets[i].load(), 1);
      }
    }
  }
}

TEST(Team, InsideAParallelRegionItHasOneMember) {
  const Threads scope(2);
  std::atomic<int> members{0};
  at::parallel_for(0, 2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Team::run([&](Team::Member& member) {
        EXPECT_EQ(member.size(), 1);
        member.barrier();
        ++members;
      });
    }
  });
  EXPECT_EQ(members.load(), 2);
}

TEST(Team, ASlowMemberIsWaitedFor) {
  const Threads scope(2);
  std::atomic<int> done{0};
  Team::run([&](Team::Member& member) {
    if (member.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      ++done;
    }
    member.barrier();
    EXPECT_EQ(done.load(), 1);
  });
}

TEST(Team, AnExceptionEndsAllAndComesBack) {
  for (const int threads : {1, 2, 4}) {
    const Threads scope(threads);
    for (int round = 0; round < 200; ++round) {
      std::string message = "none";
      try {
        Team::run([&](Team::Member& member) {
          member.barrier();
          if (member.rank() == member.size() - 1) throw std::runtime_error("the reason");
          for (int i = 0; i < 3; ++i) member.barrier();
          ADD_FAILURE() << "a member went on";
        });
      } catch (const std::runtime_error& error) {
        message = error.what();
      }
      ASSERT_EQ(message, "the reason");
    }
  }
}

}  // namespace
}  // namespace banyan::kernels
