#include "banyan/nn/weight.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace banyan::nn {
namespace {

const ComputeOptions kFp32 = {.dtype = at::kFloat};
const ComputeOptions kBf16 = {.dtype = at::kBFloat16};

TEST(Weight, ParamsAreRowRangesOfOneMaster) {
  ParamTable table;
  Weight weight(table, {{"q", 4}, {"k", 2}}, 3, kFp32, /*with_backward=*/true);
  EXPECT_EQ(table.at("q").master.sizes(), (at::IntArrayRef{4, 3}));
  EXPECT_EQ(table.num_elements(), 18);
  table.at("q").master.copy_(at::arange(12).view({4, 3}));
  table.at("k").master.fill_(-1.0);
  EXPECT_EQ(weight.master()[3][2].item<float>(), 11.0f);
  EXPECT_EQ(weight.master()[4][0].item<float>(), -1.0f);
  table.repack();
  EXPECT_EQ(weight.compute().out, 6);
  EXPECT_TRUE(weight.compute().plain.equal(weight.master()));
}

TEST(Weight, GradientsAreRowRangesOfOneBuffer) {
  ParamTable table;
  Weight weight(table, {{"q", 4}, {"k", 2}}, 3, kFp32, /*with_backward=*/true);
  EXPECT_FALSE(weight.grad().defined());
  table.ensure_grads();
  weight.grad().narrow(0, 4, 2).fill_(3.0);
  EXPECT_EQ(table.at("q").grad.sum().item<float>(), 0.0f);
  EXPECT_EQ(table.at("k").grad.sum().item<float>(), 18.0f);
  EXPECT_EQ(table.at("k").grad.data_ptr<float>(), weight.grad().data_ptr<float>() + 12);
  table.ensure_grads();  // keeps what is there
  EXPECT_EQ(table.at("k").grad.sum().item<float>(), 18.0f);
  table.zero_grads();
  EXPECT_EQ(weight.grad().sum().item<float>(), 0.0f);
  EXPECT_EQ(table.at("k").grad.data_ptr<float>(), weight.grad().data_ptr<float>() + 12);
}

TEST(Weight, MasterIsFp32UnlessTheModelIsFp64) {
  ParamTable table;
  Weight half(table, {{"a", 8}}, 4, kBf16, /*with_backward=*/true);
  Weight wide(table, {{"b", 8}}, 4, {.dtype = at::kDouble}, /*with_backward=*/true);
  EXPECT_EQ(half.master().scalar_type(), at::kFloat);
  EXPECT_EQ(wide.master().scalar_type(), at::kDouble);
}

TEST(Vector, RepackRefreshesTheComputeCopy) {
  ParamTable table;
  Vector vector(table, {{"q.bias", 2}, {"k.bias", 1}}, kBf16);
  table.at("k.bias").master.fill_(1.0 + 1.0 / 512);
  table.repack();
  EXPECT_EQ(vector.compute().scalar_type(), at::kBFloat16);
  EXPECT_EQ(vector.compute()[2].item<float>(), 1.0f);
  table.ensure_grads();
  vector.grad().copy_(at::arange(3));
  EXPECT_EQ(table.at("k.bias").grad.item<float>(), 2.0f);
}

TEST(Vector, Fp32ComputeIsTheMaster) {
  ParamTable table;
  Vector vector(table, {{"norm", 3}}, kFp32);
  table.at("norm").master.fill_(2.0);
  EXPECT_TRUE(vector.compute().equal(at::ones({3}).mul(2)));
}

}  // namespace
}  // namespace banyan::nn
