#include "banyan/core/profile.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "banyan/core/error.h"
#include "banyan/core/profile_report.h"

namespace banyan::profile {
namespace {

// A phase with two ops, the second called twice, inside one scope.
void run_something() {
  const Scope whole("whole");
  const PhaseScope phase(Phase::kForward);
  {
    const Scope op("product",
                   [] { return Work{.flops = 10, .bytes = 4, .rows = 2, .columns = 3}; });
  }
  for (int i = 0; i < 2; ++i) {
    const Scope op("norm", [] { return Work{.repeated = 1, .bytes = 7}; });
  }
}

TEST(Profile, OffKeepsNothingAndAsksForNothing) {
  bool asked = false;
  {
    const Scope op("op", [&] {
      asked = true;
      return Work{};
    });
  }
  EXPECT_FALSE(asked);
  EXPECT_TRUE(stop().empty());
}

TEST(Profile, EventsStandInOrderAndNest) {
  start();
  run_something();
  const std::vector<Event> events = stop();
  ASSERT_EQ(events.size(), 5u);
  EXPECT_STREQ(events[0].name, "whole");
  EXPECT_STREQ(events[1].name, "forward");
  EXPECT_STREQ(events[2].name, "product");
  EXPECT_EQ(events[0].phase, Phase::kOther);
  for (size_t i = 1; i < events.size(); ++i) {
    EXPECT_EQ(events[i].phase, Phase::kForward);
    EXPECT_EQ(events[i].depth, i == 1 ? 1 : 2);
    EXPECT_GE(events[i].begin_ns, events[0].begin_ns);
    EXPECT_LE(events[i].end_ns, events[0].end_ns);
    EXPECT_GE(events[i].end_ns, events[i].begin_ns);
  }
}

TEST(Profile, TheTableAddsCallsAndTakesInnerTimeOff) {
  std::vector<Event> events = {
      {.name = "outer", .depth = 0, .begin_ns = 0, .end_ns = 1000},
      {.name = "op", .depth = 1, .begin_ns = 100, .end_ns = 300, .work = {.flops = 5, .bytes = 1}},
      {.name = "in", .depth = 2, .begin_ns = 150, .end_ns = 200},
      {.name = "op", .depth = 1, .begin_ns = 400, .end_ns = 500, .work = {.flops = 6, .bytes = 2}},
      {.name = "op", .phase = Phase::kBackward, .thread = 1, .begin_ns = 0, .end_ns = 50}};
  const std::vector<Row> rows = table(events);
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].name, "outer");
  EXPECT_NEAR(rows[0].seconds, 700e-9, 1e-15);
  EXPECT_EQ(rows[1].name, "op");
  EXPECT_EQ(rows[1].calls, 2);
  EXPECT_NEAR(rows[1].seconds, 250e-9, 1e-15);
  EXPECT_EQ(rows[1].flops, 11);
  EXPECT_EQ(rows[1].bytes, 3);
  EXPECT_EQ(rows[2].name, "in");
  EXPECT_EQ(rows[3].phase, Phase::kBackward);
  EXPECT_NEAR(rows[3].seconds, 50e-9, 1e-15);
}

TEST(Profile, ShapesAreToldApart) {
  start();
  run_something();
  const std::vector<Row> rows = table(stop());
  int found = 0;
  for (const Row& row : rows) found += row.name == "product 2x3" && row.flops == 10 ? 1 : 0;
  EXPECT_EQ(found, 1);
}

TEST(Profile, RecomputationKeepsItsPhase) {
  start();
  {
    const PhaseScope again(Phase::kRecompute);
    const PhaseScope phase(Phase::kForward);
    const Scope op("op");
  }
  {
    const PhaseScope backward(Phase::kBackward);
    {
      const PhaseScope again(Phase::kRecompute);
    }
    const Scope op("op");
  }
  const std::vector<Event> events = stop();
  ASSERT_EQ(events.size(), 6u);
  EXPECT_EQ(events[2].phase, Phase::kRecompute);
  EXPECT_EQ(events[5].phase, Phase::kBackward);
}

TEST(Profile, ThreadsWriteBuffersOfTheirOwn) {
  start();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int k = 0; k < 100; ++k) run_something();
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<Event> events = stop();
  EXPECT_EQ(events.size(), 4u * 100u * 5u);
  int64_t calls = 0;
  for (const Row& row : table(events)) calls += row.calls;
  EXPECT_EQ(calls, 2000);
}

TEST(Profile, AScopeThatOutlivesItsRecordingIsDropped) {
  start();
  auto open = std::make_unique<Scope>("open");
  EXPECT_TRUE(stop().empty());
  start();
  open.reset();
  {
    const Scope op("op");
  }
  const std::vector<Event> events = stop();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_STREQ(events[0].name, "op");
  EXPECT_EQ(events[0].depth, 0);
}

TEST(Profile, TheTraceIsJsonAndNests) {
  start();
  run_something();
  std::thread(run_something).join();
  const std::string path = ::testing::TempDir() + "banyan_profile_trace.json";
  write_trace(stop(), path);
  std::ifstream file(path);
  const nlohmann::json trace = nlohmann::json::parse(file);
  std::remove(path.c_str());
  const auto& events = trace.at("traceEvents");
  ASSERT_EQ(events.size(), 10u);
  for (const auto& event : events) {
    EXPECT_EQ(event.at("ph"), "X");
    for (const auto& other : events) {
      if (event.at("tid") != other.at("tid")) continue;
      const double begin = event.at("ts"), end = begin + event.at("dur").get<double>();
      const double from = other.at("ts"), to = from + other.at("dur").get<double>();
      const double rounding = 0.002;  // microseconds
      const bool apart = end <= from + rounding || to <= begin + rounding;
      const bool inside = begin >= from - rounding && end <= to + rounding;
      const bool around = from >= begin - rounding && to <= end + rounding;
      EXPECT_TRUE(apart || inside || around);
    }
  }
  EXPECT_THROW(write_trace({}, "/nowhere/at/all.json"), FileError);
}

}  // namespace
}  // namespace banyan::profile
