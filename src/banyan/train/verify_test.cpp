#include "banyan/train/verify.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>

namespace banyan::train {
namespace {

ParamTable table_with(double gradient) {
  ParamTable params;
  params.add("weight", at::zeros({3}));
  params.params()[0].grad = at::full({3}, gradient);
  return params;
}

TEST(Verify, Schedules) {
  EXPECT_FALSE(verify_schedule("off").due(0));
  EXPECT_FALSE(verify_schedule("").due(0));
  EXPECT_TRUE(verify_schedule("first").due(0));
  EXPECT_FALSE(verify_schedule("first").due(1));
  const VerifySchedule every = verify_schedule("every:3");
  EXPECT_TRUE(every.due(0));
  EXPECT_FALSE(every.due(2));
  EXPECT_TRUE(every.due(3));
  for (const char* wrong : {"always", "every:", "every:0", "every:-1", "every:x", "first "}) {
    EXPECT_THROW(verify_schedule(wrong), std::invalid_argument) << wrong;
  }
}

TEST(Verify, EqualGradientsPassAndThoseWithSharingAreUsed) {
  ParamTable params = table_with(1.0);
  const std::vector<at::Tensor> shared = {at::full({3}, 1.0 + 1e-6)};
  const VerifyResult result = verify_gradients(shared, 2.0, 2.0, at::kFloat, params);
  EXPECT_TRUE(result.passed);
  EXPECT_LT(result.gradient_error, 1e-5);
  EXPECT_TRUE(at::equal(params.params()[0].grad, shared[0]));
}

TEST(Verify, OtherGradientsFailAndThoseWithoutSharingAreUsed) {
  ParamTable params = table_with(1.0);
  const VerifyResult result = verify_gradients({at::full({3}, 1.1)}, 2.0, 2.0, at::kFloat, params);
  EXPECT_FALSE(result.passed);
  EXPECT_NEAR(result.gradient_error, 0.1, 1e-6);
  EXPECT_TRUE(at::equal(params.params()[0].grad, at::full({3}, 1.0)));
  EXPECT_NE(result.line().find("go on without sharing"), std::string::npos);
  EXPECT_FALSE(verify_gradients({at::ones({3})}, 2.0, 2.1, at::kFloat, params).passed);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(verify_gradients({at::ones({3})}, nan, 2.0, at::kFloat, params).passed);
  EXPECT_FALSE(verify_gradients({at::full({3}, nan)}, 2.0, 2.0, at::kFloat, params).passed);
}

TEST(Verify, BoundsFollowTheComputeType) {
  EXPECT_LT(verify_bound(at::kDouble), verify_bound(at::kFloat));
  EXPECT_LT(verify_bound(at::kFloat), verify_bound(at::kBFloat16));
}

}  // namespace
}  // namespace banyan::train
