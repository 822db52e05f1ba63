#include "banyan/parallel/gradient_sum.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "banyan/testing/thread_transport.h"

namespace banyan::parallel {
namespace {

void fill(ParamTable& params, int64_t rank) {
  int64_t seed = 1;
  for (Param& param : params.params()) {
    param.grad.copy_(at::arange(param.grad.numel(), at::kDouble)
                         .mul_(0.7)
                         .add_(static_cast<double>(seed++ * 10 + rank))
                         .sin_()
                         .view(param.grad.sizes()));
  }
}

void add_params(ParamTable& params, at::ScalarType dtype) {
  params.add("a", at::zeros({3, 5}, dtype));
  params.add("b", at::zeros({7}, dtype));
  params.add("c", at::zeros({64}, dtype));
  params.ensure_grads();
}

}  // namespace

TEST(GradientSum, DoesNotDependOnTheBuckets) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    ParamTable wanted;
    add_params(wanted, dtype);
    for (int64_t rank = 0; rank < 3; ++rank) {
      ParamTable one;
      add_params(one, dtype);
      fill(one, rank);
      for (size_t i = 0; i < one.params().size(); ++i) {
        wanted.params()[i].grad.add_(one.params()[i].grad);
      }
    }
    for (const int64_t bucket : {1, 4, 15, 1000}) {
      testing::run_ranks(3, [&](Collectives& ranks) {
        ParamTable params;
        add_params(params, dtype);
        fill(params, ranks.rank());
        sum_gradients(params, ranks, bucket);
        for (size_t i = 0; i < params.params().size(); ++i) {
          EXPECT_TRUE(at::equal(params.params()[i].grad, wanted.params()[i].grad))
              << params.params()[i].name << " in buckets of " << bucket;
        }
      });
    }
  }
}

// The planner's 2 N (n - 1) / n numbers, where n divides the buckets.
TEST(GradientSum, MovesWhatThePlannerSays) {
  testing::run_ranks(2, [](Collectives& ranks) {
    ParamTable params;
    add_params(params, at::kFloat);
    sum_gradients(params, ranks, 16);
    int64_t bytes = 0;
    for (const auto& [op, traffic] : ranks.traffic()) bytes += traffic.bytes;
    EXPECT_EQ(bytes, 2 * params.num_elements() * 4 * (2 - 1) / 2);
  });
}

TEST(GradientSum, OneProcessPaysNothing) {
  ParamTable params;
  add_params(params, at::kFloat);
  fill(params, 0);
  const at::Tensor before = params.params()[1].grad.clone();
  Collectives alone;
  sum_gradients(params, alone);
  EXPECT_TRUE(at::equal(params.params()[1].grad, before));
}

}  // namespace banyan::parallel
