#include "banyan/ops/linear.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace banyan::ops {
namespace {

const ComputeOptions kNative{at::kBFloat16, at::kCPU, Kernels::kNative};
const ComputeOptions kAten16{at::kBFloat16, at::kCPU, Kernels::kAten};
const ComputeOptions kFloat32{at::kFloat, at::kCPU, Kernels::kNative};
const ComputeOptions kFloat64{at::kDouble, at::kCPU, Kernels::kNative};

at::Tensor normal(at::IntArrayRef shape, const ComputeOptions& options) {
  return at::randn(shape, at::kDouble).to(options.dtype);
}

LinearWeight packed(const at::Tensor& master,
                    const ComputeOptions& options,
                    bool with_backward = true) {
  LinearWeight weight;
  pack_weight(master, options, with_backward, weight);
  return weight;
}

double relative(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor wide = want.to(at::kDouble);
  return (got.to(at::kDouble) - wide).norm().item<double>() / (wide.norm().item<double>() + 1e-300);
}

std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

class LinearTest : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(7); }
};

TEST_F(LinearTest, EveryPathEqualsLibTorchIn64Bits) {
  struct Case {
    ComputeOptions options;
    double tolerance;
  };
  for (const Case& c :
       {Case{kFloat64, 1e-14}, {kFloat32, 1e-6}, {kNative, 4e-3}, {kAten16, 4e-3}}) {
    const bool wide = c.options.dtype == at::kDouble;
    const at::Tensor master = at::randn({70, 96}, wide ? at::kDouble : at::kFloat);
    const LinearWeight weight = packed(master, c.options);
    EXPECT_EQ(weight.is_packed(), is_native(c.options));
    const at::Tensor x = normal({33, 96}, c.options);
    const at::Tensor dy = normal({33, 70}, c.options);
    const at::Tensor bias = normal({70}, c.options);
    const at::Tensor w = master.to(c.options.dtype).to(at::kDouble);
    const at::Tensor x64 = x.to(at::kDouble);
    const at::Tensor dy64 = dy.to(at::kDouble);
    EXPECT_LE(relative(linear_forward(x, weight, bias), at::linear(x64, w, bias.to(at::kDouble))),
              c.tolerance);
    EXPECT_LE(relative(linear_forward(x, weight, {}), at::linear(x64, w)), c.tolerance);
    EXPECT_LE(relative(linear_backward_input(dy, weight), at::mm(dy64, w)), c.tolerance);
    at::Tensor grad = at::randn({70, 96}, master.options());
    at::Tensor grad_bias = at::randn({70}, master.options());
    const at::Tensor want = grad.to(at::kDouble) + at::mm(dy64.t(), x64);
    const at::Tensor want_bias = grad_bias.to(at::kDouble) + dy64.sum(0);
    linear_backward_weight(dy, x, grad, grad_bias, c.options);
    // Weight gradients are accumulated in fp32 even for bf16.
    EXPECT_LE(relative(grad, want), wide ? 1e-14 : 1e-6);
    EXPECT_LE(relative(grad_bias, want_bias), wide ? 1e-14 : 1e-6);
  }
}

TEST_F(LinearTest, TheResidualIsAddedToTheRoundedProduct) {
  for (const ComputeOptions& options : {kFloat64, kFloat32, kNative, kAten16}) {
    const bool wide = options.dtype == at::kDouble;
    for (const int64_t out : {70, 192}) {
      const at::Tensor master = at::randn({out, 96}, wide ? at::kDouble : at::kFloat);
      const LinearWeight weight = packed(master, options);
      const at::Tensor x = normal({33, 96}, options);
      const at::Tensor bias = normal({out}, options);
      const at::Tensor residual = normal({33, out}, options);
      const at::Tensor before = residual.clone();
      EXPECT_TRUE(at::equal(linear_forward(x, weight, bias, residual),
                            linear_forward(x, weight, bias).add_(residual)));
      EXPECT_TRUE(at::equal(residual, before));
    }
  }
  const LinearWeight weight = packed(at::randn({70, 96}, at::kFloat), kNative);
  const at::Tensor x = normal({33, 96}, kNative);
  EXPECT_NE(message([&] {
              linear_forward(x, weight, {}, normal({32, 70}, kNative));
            }).find("[linear] residual"),
            std::string::npos);
}

// bf16: not further from the fp64 product than LibTorch's own bf16 linear (A16).
TEST_F(LinearTest, Bf16ErrorIsThatOfLibTorch) {
  std::vector<double> ratios;
  for (int seed = 0; seed < 9; ++seed) {
    const at::Tensor master = at::randn({192, 576}, at::kFloat);
    const at::Tensor x = normal({100, 576}, kNative);
    const at::Tensor plain = master.to(at::kBFloat16);
    const at::Tensor want = at::linear(x.to(at::kDouble), plain.to(at::kDouble));
    const double ours = relative(linear_forward(x, packed(master, kNative), {}), want);
    ratios.push_back(ours / relative(at::linear(x, plain), want));
  }
  std::nth_element(ratios.begin(), ratios.begin() + 4, ratios.end());
  EXPECT_LE(ratios[4], 1.05);
}

TEST_F(LinearTest, RowsThreadsAndStridesDoNotChangeBits) {
  const int threads = at::get_num_threads();
  const at::Tensor master = at::randn({192, 576}, at::kFloat);
  const LinearWeight weight = packed(master, kNative);
  const at::Tensor wide = normal({200, 700}, kNative);
  const at::Tensor x = wide.slice(1, 20, 596);  // rows of a wider matrix
  const at::Tensor dy = normal({200, 192}, kNative);
  const at::Tensor y = linear_forward(x, weight, {});
  const at::Tensor dx = linear_backward_input(dy, weight);
  EXPECT_TRUE(at::equal(y, linear_forward(x.contiguous(), weight, {})));
  EXPECT_TRUE(at::equal(y, linear_forward(x.t().contiguous().t(), weight, {})));
  at::Tensor grad = at::zeros({192, 576}, at::kFloat);
  linear_backward_weight(dy, x, grad, {}, kNative);
  at::set_num_threads(1);
  for (int64_t rows : {1, 7, 64, 65}) {
    EXPECT_TRUE(
        at::equal(linear_forward(x.slice(0, 3, 3 + rows), weight, {}), y.slice(0, 3, 3 + rows)));
    EXPECT_TRUE(at::equal(linear_backward_input(dy.slice(0, 3, 3 + rows), weight),
                          dx.slice(0, 3, 3 + rows)));
  }
  at::Tensor grad_single = at::zeros({192, 576}, at::kFloat);
  linear_backward_weight(dy, x, grad_single, {}, kNative);
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(grad, grad_single));
}

TEST_F(LinearTest, RepackGoesIntoTheSameMemory) {
  const at::Tensor master = at::randn({70, 33}, at::kFloat);
  const at::Tensor x = normal({5, 33}, kNative);
  for (const ComputeOptions& options : {kNative, kAten16}) {
    LinearWeight weight = packed(master, options);
    const at::Tensor& form = options.kernels == Kernels::kNative ? weight.packed : weight.plain;
    const void* before = form.data_ptr();
    const at::Tensor old = linear_forward(x, weight, {});
    pack_weight(master * 2, options, true, weight);
    EXPECT_EQ(form.data_ptr(), before);
    EXPECT_TRUE(at::equal(linear_forward(x, weight, {}), old * 2));
  }
  LinearWeight weight = packed(master, kFloat32);
  EXPECT_TRUE(weight.plain.is_same(master));  // no copy where the master is the compute form
}

TEST_F(LinearTest, NoRows) {
  for (const ComputeOptions& options : {kNative, kFloat32}) {
    const LinearWeight weight = packed(at::randn({70, 96}, at::kFloat), options);
    const at::Tensor x = normal({0, 96}, options);
    const at::Tensor dy = normal({0, 70}, options);
    EXPECT_EQ(linear_forward(x, weight, {}).sizes(), at::IntArrayRef({0, 70}));
    EXPECT_EQ(linear_backward_input(dy, weight).sizes(), at::IntArrayRef({0, 96}));
    at::Tensor grad = at::zeros({70, 96}, at::kFloat);
    linear_backward_weight(dy, x, grad, {}, options);
    EXPECT_EQ(grad.abs().sum().item<float>(), 0.0f);
    const at::Tensor none = at::zeros({0}, at::kInt);
    EXPECT_EQ(embedding_forward(none, weight).sizes(), at::IntArrayRef({0, 96}));
    embedding_backward(x, none, grad);
  }
}

TEST_F(LinearTest, EmbeddingReadsTheRoundedMaster) {
  const at::Tensor master = at::randn({101, 70}, at::kFloat);
  const at::Tensor ids = at::randint(0, 101, {300}, at::kInt);
  const at::Tensor want = at::embedding(master, ids);
  EXPECT_TRUE(at::equal(embedding_forward(ids, packed(master, kNative)), want.to(at::kBFloat16)));
  EXPECT_TRUE(
      at::equal(embedding_forward(ids, packed(master, kNative, false)), want.to(at::kBFloat16)));
  EXPECT_TRUE(at::equal(embedding_forward(ids, packed(master, kAten16)), want.to(at::kBFloat16)));
  EXPECT_TRUE(at::equal(embedding_forward(ids, packed(master, kFloat32)), want));
}

TEST_F(LinearTest, EmbeddingGradientSumsInTokenOrder) {
  const int threads = at::get_num_threads();
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
    const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor ids = at::randint(0, 5, {300}, at::kInt);
    const at::Tensor dy = at::randn({300, 130}, at::kDouble).to(dtype);
    at::Tensor grad = at::randn({9, 130}, wide);
    at::Tensor want = grad.clone();
    at::Tensor single = grad.clone();
    embedding_backward(dy, ids, grad);
    for (int64_t t = 0; t < 300; ++t) want[ids[t].item<int32_t>()] += dy[t].to(wide);
    EXPECT_TRUE(at::equal(grad, want)) << dtype;
    at::set_num_threads(1);
    embedding_backward(dy, ids, single);
    at::set_num_threads(threads);
    EXPECT_TRUE(at::equal(grad, single));
  }
}

TEST_F(LinearTest, BadInputIsNamed) {
  const LinearWeight weight = packed(at::randn({70, 96}, at::kFloat), kNative);
  EXPECT_EQ(message([&] { linear_forward(normal({3, 95}, kNative), weight, {}); }),
            "[linear] x: wanted shape [T, 96], got [3, 95]");
  EXPECT_EQ(message([&] { linear_forward(normal({3, 96}, kFloat32), weight, {}); }),
            "[linear] x: wanted bf16 on the CPU for a packed weight, got Float on cpu");
  EXPECT_EQ(
      message([&] { linear_forward(normal({3, 96}, kNative), weight, normal({69}, kNative)); }),
      "[linear] bias: wanted bf16 [70]");
  EXPECT_EQ(message([&] { embedding_forward(at::tensor({1, 70}, at::kInt), weight); }),
            "[embedding] token 1: wanted an id in [0, 70), got 70");
  EXPECT_EQ(message([&] { embedding_forward(at::tensor({-1}, at::kInt), weight); }),
            "[embedding] token 0: wanted an id in [0, 70), got -1");
  at::Tensor grad = at::zeros({70, 95}, at::kFloat);
  EXPECT_EQ(message([&] {
              linear_backward_weight(
                  normal({3, 70}, kNative), normal({3, 96}, kNative), grad, {}, kNative);
            }),
            "[linear] gradient: wanted a Float buffer of shape [70, 96]");
  const LinearWeight inference = packed(at::randn({70, 96}, at::kFloat), kNative, false);
  EXPECT_THROW(linear_backward_input(normal({3, 70}, kNative), inference), std::logic_error);
}

}  // namespace
}  // namespace banyan::ops
