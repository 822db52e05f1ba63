// The value head equals a plain product, and its gradients those of autograd.
#include "banyan/ops/value_head.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace banyan::ops {
namespace {

struct Case {
  at::Tensor hidden, grad;
  ValueHeadWeight head;
};

Case random_case(int64_t rows, at::ScalarType hidden, at::ScalarType master, bool bias) {
  Case c;
  c.hidden = at::randn({rows, 37}, at::kDouble).to(hidden);
  c.grad = at::randn({rows}, at::kDouble).to(master);
  c.head.weight = at::randn({1, 37}, at::kDouble).to(master);
  if (bias) c.head.bias = at::randn({1}, at::kDouble).to(master);
  return c;
}

TEST(ValueHead, EqualsThePlainProductAndItsGradients) {
  for (const bool bias : {false, true}) {
    const Case c = random_case(21, at::kDouble, at::kDouble, bias);
    at::Tensor expected = at::mv(c.hidden, c.head.weight[0]);
    if (bias) expected = expected + c.head.bias;
    EXPECT_TRUE(at::allclose(value_head_forward(c.hidden, c.head), expected, 1e-13, 1e-13));
    at::Tensor grad_weight = at::zeros({1, 37}, at::kDouble);
    const at::Tensor grad_bias = bias ? at::zeros({1}, at::kDouble) : at::Tensor();
    const at::Tensor grad_hidden =
        value_head_backward(c.hidden, c.head, c.grad, grad_weight, grad_bias);
    EXPECT_TRUE(at::allclose(grad_weight[0], at::mv(c.hidden.t(), c.grad), 1e-13, 1e-13));
    EXPECT_TRUE(at::allclose(grad_hidden, c.grad.unsqueeze(1) * c.head.weight, 1e-13, 1e-13));
    if (bias) {
      EXPECT_NEAR(grad_bias.item<double>(), c.grad.sum().item<double>(), 1e-13);
    }
    // Gradients are added.
    value_head_backward(c.hidden, c.head, c.grad, grad_weight, grad_bias);
    EXPECT_TRUE(at::allclose(grad_weight[0], 2 * at::mv(c.hidden.t(), c.grad), 1e-13, 1e-13));
  }
}

TEST(ValueHead, ARowsBitsDependOnTheRowAlone) {
  const Case c = random_case(64, at::kBFloat16, at::kFloat, true);
  const at::Tensor all = value_head_forward(c.hidden, c.head);
  EXPECT_EQ(all.scalar_type(), at::kFloat);
  for (const int64_t row : {0, 17, 63}) {
    EXPECT_TRUE(
        value_head_forward(c.hidden.narrow(0, row, 1), c.head).equal(all.narrow(0, row, 1)));
  }
}

TEST(ValueHead, ShapesThatDoNotFitAreNamed) {
  const Case c = random_case(2, at::kFloat, at::kFloat, false);
  EXPECT_THROW(value_head_forward(c.hidden.narrow(1, 0, 5), c.head), std::invalid_argument);
}

}  // namespace
}  // namespace banyan::ops
