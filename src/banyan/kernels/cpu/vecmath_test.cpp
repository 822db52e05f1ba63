#include "banyan/kernels/cpu/vecmath.h"

#include <c10/util/BFloat16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace banyan::kernels {
namespace {

BANYAN_MULTIVERSION
void exp_all(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = exp_f32(x[i]);
}

BANYAN_MULTIVERSION
void log_all(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = log_f32(x[i]);
}

double ulps(float got, double want) {
  const float rounded = static_cast<float>(want);
  return std::abs(got - want) / (std::nextafter(std::abs(rounded), INFINITY) - std::abs(rounded));
}

TEST(VecMath, ExpWithinTwoUlp) {
  std::vector<float> x;
  for (float v = -86.5f; v < 88.7f; v += 0.000731f) x.push_back(v);
  std::vector<float> y(x.size());
  exp_all(x.data(), y.data(), static_cast<int64_t>(x.size()));
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, ulps(y[i], std::exp(static_cast<double>(x[i]))));
  }
  EXPECT_LE(worst, 2.0);
}

TEST(VecMath, ExpAtTheEnds) {
  EXPECT_EQ(exp_f32(0.0f), 1.0f);
  EXPECT_EQ(exp_f32(-INFINITY), 0.0f);
  EXPECT_EQ(exp_f32(-100.0f), 0.0f);
  EXPECT_EQ(exp_f32(INFINITY), INFINITY);
  EXPECT_EQ(exp_f32(89.0f), INFINITY);
  EXPECT_TRUE(std::isnan(exp_f32(NAN)));
  EXPECT_EQ(sigmoid_f32(0.0f), 0.5f);
  EXPECT_EQ(sigmoid_f32(-200.0f), 0.0f);
}

TEST(VecMath, LogWithinTwoUlp) {
  std::vector<float> x;
  for (float v = 1e-30f; v < 1e30f; v *= 1.00037f) x.push_back(v);
  for (float v = 0.5f; v < 2.0f; v += 0.000013f) x.push_back(v);
  std::vector<float> y(x.size());
  log_all(x.data(), y.data(), static_cast<int64_t>(x.size()));
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, ulps(y[i], std::log(static_cast<double>(x[i]))));
  }
  EXPECT_LE(worst, 2.0);
  EXPECT_EQ(log_f32(0.0f), -INFINITY);
  EXPECT_EQ(log_f32(1.0f), 0.0f);
  EXPECT_EQ(log_f32(INFINITY), INFINITY);
  EXPECT_TRUE(std::isnan(log_f32(-1.0f)));
  EXPECT_TRUE(std::isnan(log_f32(NAN)));
}

// A value does not depend on where in a loop it stands.
TEST(VecMath, VectorBodyEqualsTail) {
  std::vector<float> x(77);
  for (size_t i = 0; i < x.size(); ++i) x[i] = -3.7f + 0.131f * static_cast<float>(i);
  std::vector<float> whole(x.size());
  std::vector<float> single(x.size());
  exp_all(x.data(), whole.data(), 77);
  for (int64_t i = 0; i < 77; ++i) exp_all(x.data() + i, single.data() + i, 1);
  EXPECT_EQ(whole, single);
  for (float& v : x) v = v * v + 0.1f;
  log_all(x.data(), whole.data(), 77);
  for (int64_t i = 0; i < 77; ++i) log_all(x.data() + i, single.data() + i, 1);
  EXPECT_EQ(whole, single);
}

TEST(VecMath, Bf16RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0xfff00000u; bits += 32749) {
    const float x = std::bit_cast<float>(bits);
    if (std::isnan(x)) continue;
    EXPECT_EQ(f32_to_bf16(x), c10::BFloat16(x).x) << x;
  }
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(NAN))));
  EXPECT_EQ(bf16_to_f32(0x3f80), 1.0f);
}

}  // namespace
}  // namespace banyan::kernels
