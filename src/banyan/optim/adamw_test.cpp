#include "banyan/optim/adamw.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>

#include "banyan/core/rng.h"

namespace banyan::optim {
namespace {

// Deterministic values in [-1, 1).
at::Tensor noise(int64_t n, uint64_t seed) {
  at::Tensor out = at::empty({n}, at::kFloat);
  for (int64_t i = 0; i < n; ++i) {
    out.mutable_data_ptr<float>()[i] =
        2.0f * uniform({seed, 0, 0, 0}, static_cast<uint64_t>(i)) - 1.0f;
  }
  return out;
}

// What torch.optim.AdamW (2.13.0, fp64) makes of w = (0.5, -1.25, 3, 0) in ten steps with lr 0.05,
// betas (0.9, 0.99), weight decay 0.1 and gradient sin(1.7 i + 0.9 t) + w / 4.
TEST(AdamW, TenStepsEqualTorch) {
  const double wanted[] = {
      0.23738400910638724, -1.1443374485299034, 2.5506629576041924, 0.076120715065520636};
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    ParamTable table;
    table.add("w", at::tensor({0.5, -1.25, 3.0, 0.0}, dtype));
    table.ensure_grads();
    AdamW optimizer(table, {.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1});
    Param& w = table.at("w");
    for (int t = 0; t < 10; ++t) {
      for (int i = 0; i < 4; ++i) w.grad[i].fill_(std::sin(1.7 * i + 0.9 * t));
      w.grad.add_(w.master, 0.25);
      optimizer.step(0.05, 1.0);
    }
    EXPECT_EQ(optimizer.num_steps(), 10);
    for (int i = 0; i < 4; ++i) {
      EXPECT_NEAR(w.master[i].item<double>(), wanted[i], dtype == at::kDouble ? 1e-14 : 1e-6);
    }
  }
}

// The formula of the header in double, element by element, on enough elements for several chunks
// and a tail.
TEST(AdamW, KernelFollowsTheFormulaAndTheClipFactor) {
  const int64_t n = 70001;
  ParamTable table;
  table.add("w", noise(n, 1));
  table.ensure_grads();
  AdamW optimizer(table, {.weight_decay = 0.05});
  Param& w = table.at("w");
  std::vector<double> x(n), m(n, 0.0), v(n, 0.0);
  for (int64_t i = 0; i < n; ++i) x[i] = w.master.const_data_ptr<float>()[i];
  for (int t = 1; t <= 3; ++t) {
    w.grad.copy_(noise(n, 100 + t));
    optimizer.step(1e-2, 0.5);
    for (int64_t i = 0; i < n; ++i) {
      const double g = 0.5 * w.grad.const_data_ptr<float>()[i];
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.999 * v[i] + 0.001 * g * g;
      const double corrected = v[i] / (1.0 - std::pow(0.999, t));
      x[i] = x[i] * (1.0 - 1e-2 * 0.05) -
             1e-2 * m[i] / (1.0 - std::pow(0.9, t)) / (std::sqrt(corrected) + 1e-8);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    ASSERT_NEAR(w.master.const_data_ptr<float>()[i], x[i], 5e-7) << i;
    ASSERT_NEAR(optimizer.first_moments()[0].const_data_ptr<float>()[i], m[i], 1e-7) << i;
    ASSERT_NEAR(optimizer.second_moments()[0].const_data_ptr<float>()[i], v[i], 1e-9) << i;
  }
}

TEST(AdamW, ThreadCountDoesNotChangeBits) {
  const int threads = at::get_num_threads();
  at::Tensor weights[2];
  double norms[2];
  for (int run = 0; run < 2; ++run) {
    at::set_num_threads(run + 1);
    ParamTable table;
    table.add("w", noise(200003, 1));
    table.ensure_grads();
    table.at("w").grad.copy_(noise(200003, 2));
    AdamW optimizer(table, {});
    norms[run] = grad_norm(table);
    optimizer.step(1e-3, 0.7);
    weights[run] = table.at("w").master;
  }
  at::set_num_threads(threads);
  EXPECT_EQ(norms[0], norms[1]);
  EXPECT_TRUE(at::equal(weights[0], weights[1]));
}

TEST(GradNorm, IsTheNormOfAllGradientsTogether) {
  ParamTable table;
  table.add("a", at::tensor({0.0, 0.0}, at::kFloat));
  table.add("b", at::tensor({0.0}, at::kDouble));
  table.add("c", at::tensor({0.0}, at::kFloat));
  EXPECT_EQ(grad_norm(table), 0.0);
  table.ensure_grads();
  table.at("a").grad.copy_(at::tensor({2.0, -3.0}, at::kFloat));
  table.at("b").grad.fill_(6.0);
  EXPECT_EQ(grad_norm(table), 7.0);
  table.at("c").grad.fill_(std::numeric_limits<float>::infinity());
  EXPECT_FALSE(std::isfinite(grad_norm(table)));
}

TEST(AdamW, SaysOfEachParameterThatItIsDone) {
  ParamTable table;
  table.add("a", at::tensor({1.0, 2.0}, at::kFloat));
  table.add("b", at::tensor({3.0}, at::kFloat));
  table.ensure_grads();
  table.at("a").grad.fill_(1.0);
  table.at("b").grad.fill_(1.0);
  AdamW optimizer(table, {.weight_decay = 0.0});
  std::vector<std::string> names;
  optimizer.on_stepped([&](const Param& param) {
    names.push_back(param.name);
    EXPECT_LT(param.master.sum().item<float>(), 3.0f) << "it has moved";
  });
  optimizer.step(0.5, 1.0);
  EXPECT_EQ(names, (std::vector<std::string>{"a", "b"}));
}

TEST(AdamW, BadOptionsAreNamed) {
  ParamTable table;
  EXPECT_THROW(AdamW(table, {.beta1 = 1.0}), std::invalid_argument);
  EXPECT_THROW(AdamW(table, {.eps = -1.0}), std::invalid_argument);
  EXPECT_THROW(AdamW(table, {.weight_decay = -0.1}), std::invalid_argument);
}

}  // namespace
}  // namespace banyan::optim
