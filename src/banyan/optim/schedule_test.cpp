#include "banyan/optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

namespace banyan::optim {
namespace {

ScheduleOptions options(const std::string& type) {
  ScheduleOptions out;
  out.type = type;
  out.lr = 2.0;
  out.total_steps = 20;
  return out;
}

TEST(Schedule, ConstantWithAndWithoutWarmUp) {
  ScheduleOptions constant = options("constant");
  for (const int64_t t : {0, 7, 100}) EXPECT_EQ(learning_rate(constant, t), 2.0);
  constant.warmup_steps = 4;
  EXPECT_EQ(learning_rate(constant, 0), 0.0);
  EXPECT_EQ(learning_rate(constant, 1), 0.5);
  EXPECT_EQ(learning_rate(constant, 3), 1.5);
  EXPECT_EQ(learning_rate(constant, 4), 2.0);
  constant.zero_indexed_step = false;
  EXPECT_EQ(learning_rate(constant, 0), 0.5);
  EXPECT_EQ(learning_rate(constant, 3), 2.0);
}

TEST(Schedule, WarmUpRatioIsRoundedDownAndStepsWin) {
  ScheduleOptions constant = options("constant");
  constant.warmup_ratio = 0.24;  // int(4.8) = 4
  EXPECT_EQ(learning_rate(constant, 2), 1.0);
  constant.warmup_steps = 8;
  EXPECT_EQ(learning_rate(constant, 2), 0.5);
  constant.warmup_steps = 0;
  EXPECT_EQ(learning_rate(constant, 2), 1.0);
}

TEST(Schedule, LinearFallsToItsFloor) {
  ScheduleOptions linear = options("linear");
  linear.warmup_steps = 4;
  linear.min_lr_ratio = 0.25;
  EXPECT_EQ(learning_rate(linear, 2), 1.0);
  EXPECT_EQ(learning_rate(linear, 4), 2.0);
  EXPECT_DOUBLE_EQ(learning_rate(linear, 12), 2.0 * (0.25 + 0.75 * 0.5));
  EXPECT_DOUBLE_EQ(learning_rate(linear, 20), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(linear, 30), 0.5);
}

TEST(Schedule, CosineHalfACycle) {
  ScheduleOptions cosine = options("cosine");
  cosine.warmup_steps = 4;
  cosine.min_lr_ratio = 0.1;
  EXPECT_DOUBLE_EQ(learning_rate(cosine, 1), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(cosine, 4), 2.0);
  EXPECT_NEAR(learning_rate(cosine, 12), 2.0 * 0.55, 1e-15);
  EXPECT_NEAR(learning_rate(cosine, 8), 2.0 * (0.55 + 0.45 * std::sqrt(0.5)), 1e-15);
  EXPECT_DOUBLE_EQ(learning_rate(cosine, 20), 0.2);
  cosine.num_cycles = 1.0;
  EXPECT_DOUBLE_EQ(learning_rate(cosine, 12), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate(cosine, 20), 2.0);
}

TEST(Schedule, BadOptionsAreNamed) {
  EXPECT_THROW(learning_rate(options("wsd"), 0), std::invalid_argument);
  ScheduleOptions bad = options("cosine");
  bad.min_lr_ratio = 1.5;
  EXPECT_THROW(learning_rate(bad, 0), std::invalid_argument);
  bad = options("constant");
  bad.lr = -1.0;
  EXPECT_THROW(learning_rate(bad, 0), std::invalid_argument);
}

}  // namespace
}  // namespace banyan::optim
