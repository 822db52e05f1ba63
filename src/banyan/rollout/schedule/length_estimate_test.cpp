#include "banyan/rollout/schedule/length_estimate.h"

#include <gtest/gtest.h>

#include "banyan/rollout/schedule/spill.h"

namespace banyan::rollout {
namespace {

TEST(LengthEstimate, StartsAtSevenTenths) {
  LengthEstimate lengths(1.0);
  const int32_t source = lengths.source("gsm8k");
  EXPECT_EQ(lengths.expected(source, 1000, 0), 700);
  EXPECT_EQ(lengths.expected(source, 1000, 800), 801) << "at least one more";
  EXPECT_EQ(lengths.expected(source, 1000, 1000), 1000);
  EXPECT_EQ(lengths.expected(source, 1, 0), 1);
}

TEST(LengthEstimate, LearnsAQuantilePerSource) {
  LengthEstimate lengths(1.0);
  const int32_t a = lengths.source("a");
  const int32_t b = lengths.source("b");
  EXPECT_EQ(lengths.source("a"), a);
  for (int32_t length = 1; length <= 100; ++length) lengths.add(a, length);
  EXPECT_EQ(lengths.expected(a, 200, 0), 71);
  EXPECT_EQ(lengths.expected(a, 50, 0), 50) << "clipped";
  EXPECT_EQ(lengths.expected(a, 200, 90), 98) << "seven tenths of those longer than 90";
  EXPECT_EQ(lengths.expected(a, 200, 100), 200) << "longer than any seen";
  EXPECT_EQ(lengths.expected(a, 5000, 0), 500) << "never below a tenth of the limit";
  EXPECT_EQ(lengths.expected(b, 200, 0), 140) << "another source";
  for (int32_t i = 0; i < 256; ++i) lengths.add(a, 7);
  EXPECT_EQ(lengths.expected(a, 20, 0), 7) << "old lengths are forgotten";
}

TEST(LengthEstimate, PreemptionsRaiseAndQuietPassesLower) {
  LengthEstimate lengths(1.0);
  const int32_t source = lengths.source("");
  lengths.on_preemption();
  EXPECT_EQ(lengths.expected(source, 1000, 0), 800);
  for (int32_t i = 0; i < 10; ++i) lengths.on_preemption();
  EXPECT_EQ(lengths.expected(source, 1000, 0), 1000);
  for (int32_t i = 0; i < 599; ++i) lengths.on_quiet_pass();
  EXPECT_EQ(lengths.expected(source, 1000, 0), 1000);
  lengths.on_quiet_pass();
  EXPECT_EQ(lengths.expected(source, 1000, 0), 950);
  for (int32_t i = 0; i < 100 * 600; ++i) lengths.on_quiet_pass();
  EXPECT_EQ(lengths.expected(source, 1000, 0), 100) << "the floor";
}

TEST(LengthEstimate, ConservativenessScales) {
  EXPECT_EQ(LengthEstimate(0.5).source(""), 0);
  LengthEstimate half(0.5);
  EXPECT_EQ(half.expected(half.source(""), 1000, 0), 350);
  LengthEstimate twice(2.0);
  EXPECT_EQ(twice.expected(twice.source(""), 1000, 0), 1000);
  LengthEstimate little(0.01);
  EXPECT_EQ(little.expected(little.source(""), 1000, 0), 100);
}

TEST(LengthEstimate, ManySourcesShareOne) {
  LengthEstimate lengths(1.0);
  for (int32_t i = 0; i < 1000; ++i) EXPECT_EQ(lengths.source(std::to_string(i)), i);
  EXPECT_EQ(lengths.source("one more"), 999);
  EXPECT_EQ(lengths.source("and more"), 999);
}

TEST(Spill, IsWorthItWhereCopyingIsFaster) {
  // 10 pages of 1,000 bytes at 1,000 bytes/s: 10 s. 100 tokens at 0.2 s: 20 s.
  const SpillCosts costs{.bytes_per_second = 1000, .seconds_per_token = 0.2};
  EXPECT_TRUE(worth_spilling(costs, 10, 1000, 100));
  EXPECT_FALSE(worth_spilling(costs, 10, 1000, 49));
  EXPECT_FALSE(worth_spilling({}, 10, 1000, 100)) << "costs unknown";
}

}  // namespace
}  // namespace banyan::rollout
