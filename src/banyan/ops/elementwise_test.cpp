// RMSNorm, rotary embedding, SwiGLU: values, gradients, bits, messages.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "banyan/ops/attention_test_util.h"
#include "banyan/ops/rms_norm.h"
#include "banyan/ops/rope.h"
#include "banyan/ops/swiglu.h"

namespace banyan::ops {
namespace {

using attention_test::relative_error;
using attention_test::same_bits;

const ComputeOptions kNativeBf16{at::kBFloat16, at::kCPU, Kernels::kNative};
const ComputeOptions kAtenBf16{at::kBFloat16, at::kCPU, Kernels::kAten};
const ComputeOptions kDouble{at::kDouble, at::kCPU, Kernels::kAten};
constexpr double kEps = 1e-5;
// One rounding to bf16, and three in a row.
constexpr double kOneRounding = 2.2e-3;
constexpr double kThreeRoundings = 4e-3;

at::Tensor normal(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble)
      .to(at::kBFloat16)
      .to(at::kDouble);
}

at::Tensor bf16(const at::Tensor& x) { return x.to(at::kBFloat16); }

// Central differences of sum(weights * f(x)) against `gradient`.
void check_gradient(const std::function<at::Tensor(const at::Tensor&)>& f,
                    const at::Tensor& x,
                    const at::Tensor& weights,
                    const at::Tensor& gradient) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    double sides[2];
    for (const int side : {0, 1}) {
      const at::Tensor moved = x.clone();
      moved.data_ptr<double>()[i] += side == 0 ? -1e-6 : 1e-6;
      sides[side] = f(moved).mul(weights).sum().item<double>();
    }
    EXPECT_NEAR((sides[1] - sides[0]) / 2e-6, gradient.contiguous().data_ptr<double>()[i], 1e-7);
  }
}

template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

// --- RMSNorm ---

// In plain loops, fp64.
at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight) {
  const at::Tensor y = x.clone();
  const int64_t n = x.size(-1);
  for (int64_t row = 0; row < x.numel() / n; ++row) {
    double* values = y.data_ptr<double>() + row * n;
    double sum = 0.0;
    for (int64_t i = 0; i < n; ++i) sum += values[i] * values[i];
    const double r = 1.0 / std::sqrt(sum / static_cast<double>(n) + kEps);
    for (int64_t i = 0; i < n; ++i) values[i] *= r * weight.data_ptr<double>()[i];
  }
  return y;
}

TEST(RmsNorm, EqualsTheReference) {
  for (const int64_t n : {1, 16, 40, 576}) {
    const at::Tensor x = normal({5, 3, n}, 1);
    const at::Tensor w = normal({n}, 2);
    const at::Tensor wanted = rms_norm_reference(x, w);
    EXPECT_LE(relative_error(rms_norm_forward(x, w, kEps, kDouble), wanted), 1e-14);
    EXPECT_LE(relative_error(rms_norm_forward(bf16(x), bf16(w), kEps, kNativeBf16), wanted),
              kThreeRoundings);
    EXPECT_LE(relative_error(rms_norm_forward(bf16(x), bf16(w), kEps, kAtenBf16), wanted),
              kThreeRoundings);
  }
}

TEST(RmsNorm, CastsBeforeTheWeight) {
  // x = 1 + 2^-7 in every place: xh rounds to 1, so y is w exactly.
  const at::Tensor x = at::zeros({1, 32}, at::kBFloat16).fill_(1.0078125);
  const at::Tensor w = bf16(normal({32}, 3));
  EXPECT_TRUE(same_bits(rms_norm_forward(x, w, kEps, kNativeBf16), w.unsqueeze(0)));
  EXPECT_TRUE(same_bits(rms_norm_forward(x, w, kEps, kAtenBf16), w.unsqueeze(0)));
}

TEST(RmsNorm, GradientsPassANumericCheck) {
  const at::Tensor x = normal({3, 7}, 1);
  const at::Tensor w = normal({7}, 2);
  const at::Tensor dy = normal({3, 7}, 3);
  at::Tensor grad_weight = at::zeros({7}, at::kDouble).fill_(2.0);
  const at::Tensor dx = rms_norm_backward(dy, x, w, kEps, grad_weight, kDouble);
  check_gradient([&](const at::Tensor& at) { return rms_norm_reference(at, w); }, x, dy, dx);
  check_gradient(
      [&](const at::Tensor& at) { return rms_norm_reference(x, at); }, w, dy, grad_weight.sub(2.0));
}

TEST(RmsNorm, NativeBackwardIsCloseToFp64) {
  const at::Tensor x = normal({300, 40}, 1);
  const at::Tensor w = normal({40}, 2);
  const at::Tensor dy = normal({300, 40}, 3);
  at::Tensor wanted_weight = at::zeros({40}, at::kDouble);
  const at::Tensor wanted = rms_norm_backward(dy, x, w, kEps, wanted_weight, kDouble);
  for (const ComputeOptions& options : {kNativeBf16, kAtenBf16}) {
    at::Tensor grad_weight = at::zeros({40}, at::kFloat);
    const at::Tensor dx = rms_norm_backward(bf16(dy), bf16(x), bf16(w), kEps, grad_weight, options);
    EXPECT_LE(relative_error(dx, wanted), kOneRounding);
    EXPECT_LE(relative_error(grad_weight, wanted_weight), kOneRounding);
  }
}

TEST(RmsNorm, BackwardAddsTheResidual) {
  const at::Tensor x = normal({70, 40}, 1);
  const at::Tensor w = normal({40}, 2);
  const at::Tensor dy = normal({70, 40}, 3);
  const at::Tensor past = normal({70, 40}, 4);
  at::Tensor grad_weight = at::zeros({40}, at::kDouble);
  const at::Tensor wanted = rms_norm_backward(dy, x, w, kEps, grad_weight, kDouble).add_(past);
  at::Tensor again = at::zeros({40}, at::kDouble);
  const at::Tensor plain = rms_norm_backward(dy, x, w, kEps, again, kDouble, past);
  EXPECT_TRUE(same_bits(plain, wanted));
  EXPECT_TRUE(same_bits(again, grad_weight));
  for (const ComputeOptions& options : {kNativeBf16, kAtenBf16}) {
    at::Tensor narrow = at::zeros({40}, at::kFloat);
    const at::Tensor dx =
        rms_norm_backward(bf16(dy), bf16(x), bf16(w), kEps, narrow, options, bf16(past));
    EXPECT_LE(relative_error(dx, wanted), kOneRounding);
  }
  EXPECT_NE(error_of([&] {
              rms_norm_backward(dy, x, w, kEps, again, kDouble, past.slice(0, 1));
            }).find("[rms_norm] residual"),
            std::string::npos);
}

TEST(RmsNorm, BitsDependOnTheRowAloneAndNotOnThreads) {
  const at::Tensor x = bf16(normal({201, 576}, 1));
  const at::Tensor w = bf16(normal({576}, 2));
  const at::Tensor dy = bf16(normal({201, 576}, 3));
  const int threads = at::get_num_threads();
  std::vector<at::Tensor> y, dx, grad_weight;
  for (const int count : {1, 2}) {
    at::set_num_threads(count);
    y.push_back(rms_norm_forward(x, w, kEps, kNativeBf16));
    grad_weight.push_back(at::zeros({576}, at::kFloat));
    dx.push_back(rms_norm_backward(dy, x, w, kEps, grad_weight.back(), kNativeBf16));
  }
  at::set_num_threads(threads);
  EXPECT_TRUE(same_bits(y[0], y[1]));
  EXPECT_TRUE(same_bits(dx[0], dx[1]));
  EXPECT_TRUE(same_bits(grad_weight[0], grad_weight[1]));
  EXPECT_TRUE(
      same_bits(rms_norm_forward(x.slice(0, 77, 78), w, kEps, kNativeBf16), y[0].slice(0, 77, 78)));
}

TEST(RmsNorm, EmptyAndWrongInputs) {
  const at::Tensor w = bf16(normal({8}, 2));
  EXPECT_EQ(rms_norm_forward(at::zeros({0, 8}, at::kBFloat16), w, kEps, kNativeBf16).numel(), 0);
  EXPECT_EQ(
      error_of([&] { rms_norm_forward(at::zeros({2, 9}, at::kBFloat16), w, kEps, kNativeBf16); }),
      "[rms_norm] x: wanted [..., [8]], got [2, 9]");
  EXPECT_EQ(
      error_of([&] { rms_norm_forward(at::zeros({2, 8}, at::kFloat), w, kEps, kNativeBf16); }),
      "[rms_norm] dtype: wanted BFloat16, got x Float, weight BFloat16");
}

// --- RoPE ---

struct Tables {
  at::Tensor cos, sin;
};

Tables tables(int64_t length, int64_t half) {
  const at::Tensor frequency =
      at::arange(half, at::kDouble).mul(-std::log(10000.0) / static_cast<double>(half)).exp();
  const at::Tensor angle = at::arange(length, at::kDouble).unsqueeze(1).mul(frequency);
  return {angle.cos(), angle.sin()};
}

at::Tensor rope_reference(const at::Tensor& x, const std::vector<int32_t>& positions) {
  const at::Tensor y = x.clone();
  const int64_t half = x.size(2) / 2;
  for (int64_t t = 0; t < x.size(0); ++t) {
    for (int64_t h = 0; h < x.size(1); ++h) {
      double* values = y.data_ptr<double>() + (t * x.size(1) + h) * 2 * half;
      for (int64_t i = 0; i < half; ++i) {
        const double angle =
            positions[t] * std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
        const double x1 = values[i];
        const double x2 = values[half + i];
        values[i] = x1 * std::cos(angle) - x2 * std::sin(angle);
        values[half + i] = x2 * std::cos(angle) + x1 * std::sin(angle);
      }
    }
  }
  return y;
}

TEST(Rope, EqualsTheReferenceAndItsTranspose) {
  for (const int64_t dim : {2, 10, 64}) {
    const std::vector<int32_t> ids{0, 1, 5, 5, 99, 2};
    const at::Tensor positions = at::tensor(ids, at::kInt);
    const Tables wide = tables(100, dim / 2);
    const Tables narrow{wide.cos.to(at::kFloat), wide.sin.to(at::kFloat)};
    const at::Tensor x = normal({6, 3, dim}, 1);
    const at::Tensor wanted = rope_reference(x, ids);
    EXPECT_LE(relative_error(rope_forward(x, positions, wide.cos, wide.sin, kDouble), wanted),
              1e-13);
    const at::Tensor dy = normal({6, 3, dim}, 2);
    const at::Tensor dx = rope_backward(dy, positions, wide.cos, wide.sin, kDouble);
    check_gradient([&](const at::Tensor& at) { return rope_reference(at, ids); }, x, dy, dx);
    for (const ComputeOptions& options : {kNativeBf16, kAtenBf16}) {
      EXPECT_LE(
          relative_error(rope_forward(bf16(x), positions, narrow.cos, narrow.sin, options), wanted),
          kOneRounding);
      EXPECT_LE(
          relative_error(rope_backward(bf16(dy), positions, narrow.cos, narrow.sin, options), dx),
          kOneRounding);
    }
    // Heads that stand side by side with others are read and written where they are.
    const at::Tensor wider = bf16(normal({6, 5, dim}, 3));
    const at::Tensor part = wider.slice(1, 1, 4);
    EXPECT_TRUE(
        same_bits(rope_forward(part, positions, narrow.cos, narrow.sin, kNativeBf16),
                  rope_forward(part.contiguous(), positions, narrow.cos, narrow.sin, kNativeBf16)));
    for (const ComputeOptions& options : {kNativeBf16, kAtenBf16}) {
      at::Tensor out = wider.clone();
      at::Tensor slot = out.slice(1, 1, 4);
      rope_backward_into(bf16(dy), positions, narrow.cos, narrow.sin, options, slot);
      EXPECT_TRUE(same_bits(slot.contiguous(),
                            rope_backward(bf16(dy), positions, narrow.cos, narrow.sin, options)));
      EXPECT_TRUE(same_bits(out.slice(1, 4).contiguous(), wider.slice(1, 4).contiguous()));
      EXPECT_TRUE(same_bits(out.slice(1, 0, 1).contiguous(), wider.slice(1, 0, 1).contiguous()));
    }
    // So are heads that are rotated where they stand.
    for (const ComputeOptions& options : {kNativeBf16, kAtenBf16}) {
      at::Tensor in_place = wider.clone();
      at::Tensor heads = in_place.slice(1, 1, 4);
      rope_forward_into(heads, positions, narrow.cos, narrow.sin, options, heads);
      EXPECT_TRUE(same_bits(heads.contiguous(),
                            rope_forward(part, positions, narrow.cos, narrow.sin, options)));
      EXPECT_TRUE(same_bits(in_place.slice(1, 4).contiguous(), wider.slice(1, 4).contiguous()));
    }
    // A row alone has the bits it has in company.
    const at::Tensor all = rope_forward(bf16(x), positions, narrow.cos, narrow.sin, kNativeBf16);
    const at::Tensor one = rope_forward(
        bf16(x).slice(0, 4, 5), positions.slice(0, 4, 5), narrow.cos, narrow.sin, kNativeBf16);
    EXPECT_TRUE(same_bits(one, all.slice(0, 4, 5)));
  }
}

TEST(Rope, WrongInputs) {
  const Tables t = tables(10, 4);
  const at::Tensor x = normal({2, 1, 8}, 1);
  const auto message = [&](const std::vector<int32_t>& ids) {
    return error_of([&] { rope_forward(x, at::tensor(ids, at::kInt), t.cos, t.sin, kDouble); });
  };
  EXPECT_EQ(message({0, 9}), "");
  EXPECT_EQ(message({0, 10}), "[rope] position: wanted 0 .. 9 (the length of the table), got 10");
  EXPECT_EQ(message({-1, 3}), "[rope] position: wanted 0 .. 9 (the length of the table), got -1");
  EXPECT_EQ(message({1}), "[rope] positions: wanted [2] int32, got [1] Int");
}

// --- SwiGLU ---

at::Tensor swiglu_reference(const at::Tensor& gate_up) {
  const int64_t n = gate_up.size(1) / 2;
  at::Tensor y = at::zeros({gate_up.size(0), n}, at::kDouble);
  for (int64_t t = 0; t < gate_up.size(0); ++t) {
    const double* row = gate_up.data_ptr<double>() + t * 2 * n;
    for (int64_t i = 0; i < n; ++i) {
      y.data_ptr<double>()[t * n + i] = row[i] / (1.0 + std::exp(-row[i])) * row[n + i];
    }
  }
  return y;
}

TEST(Swiglu, EqualsTheReferenceForwardAndBackward) {
  const at::Tensor x = normal({3, 14}, 1).mul(3.0);
  const at::Tensor dy = normal({3, 7}, 2);
  const auto [dx, again] = swiglu_backward(dy, x, kDouble);
  EXPECT_LE(relative_error(swiglu_forward(x, kDouble), swiglu_reference(x)), 1e-14);
  EXPECT_TRUE(same_bits(again, swiglu_forward(x, kDouble)));
  check_gradient(swiglu_reference, x, dy, dx);

  const at::Tensor big = normal({70, 2 * 333}, 3).mul(4.0).to(at::kBFloat16).to(at::kDouble);
  const at::Tensor big_dy = normal({70, 333}, 4);
  for (const ComputeOptions& options : {kNativeBf16, kAtenBf16}) {
    EXPECT_LE(relative_error(swiglu_forward(bf16(big), options), swiglu_reference(big)),
              kOneRounding);
    const SwigluGradients gradients = swiglu_backward(bf16(big_dy), bf16(big), options);
    EXPECT_LE(relative_error(gradients.gate_up, swiglu_backward(big_dy, big, kDouble).gate_up),
              kOneRounding);
    EXPECT_TRUE(same_bits(gradients.y, swiglu_forward(bf16(big), options)));
  }
}

TEST(Swiglu, BackwardTakesTheMemoryThatItIsHandedAndNoOther) {
  const at::Tensor kept_x = bf16(normal({5, 2 * 40}, 1));
  const at::Tensor kept_dy = bf16(normal({5, 40}, 2));
  const SwigluGradients plain = swiglu_backward(kept_dy, kept_x, kNativeBf16);
  EXPECT_TRUE(same_bits(kept_x, bf16(normal({5, 2 * 40}, 1))));
  EXPECT_TRUE(same_bits(kept_dy, bf16(normal({5, 40}, 2))));

  at::Tensor x = kept_x.clone();
  at::Tensor dy = kept_dy.clone();
  const void* of_x = x.data_ptr();
  const void* of_dy = dy.data_ptr();
  const SwigluGradients in_place = swiglu_backward(std::move(dy), std::move(x), kNativeBf16);
  EXPECT_EQ(in_place.gate_up.data_ptr(), of_x);
  EXPECT_EQ(in_place.y.data_ptr(), of_dy);
  EXPECT_TRUE(same_bits(in_place.gate_up, plain.gate_up));
  EXPECT_TRUE(same_bits(in_place.y, plain.y));

  // A view is handed over, its memory is not.
  const at::Tensor whole = kept_x.clone();
  swiglu_backward(kept_dy.clone(), whole.slice(0, 0, 5), kNativeBf16);
  EXPECT_TRUE(same_bits(whole, kept_x));
}

TEST(Swiglu, ExtremeGatesStayFinite) {
  const at::Tensor x = at::tensor({300.0, -300.0, 2.0, 2.0}, at::kDouble).view({1, 4});
  const at::Tensor y = swiglu_forward(bf16(x), kNativeBf16).to(at::kDouble);
  EXPECT_TRUE(at::equal(y, at::tensor({600.0, 0.0}, at::kDouble).view({1, 2})));
  const at::Tensor ones = at::zeros({1, 2}, at::kBFloat16).fill_(1.0);
  EXPECT_FALSE(swiglu_backward(ones, bf16(x), kNativeBf16).gate_up.isnan().any().item<bool>());
}

TEST(Swiglu, RowBitsThreadsAndWrongInputs) {
  const at::Tensor x = bf16(normal({120, 2 * 333}, 1));
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor one = swiglu_forward(x, kNativeBf16);
  at::set_num_threads(2);
  const at::Tensor two = swiglu_forward(x, kNativeBf16);
  at::set_num_threads(threads);
  EXPECT_TRUE(same_bits(one, two));
  EXPECT_TRUE(same_bits(swiglu_forward(x.slice(0, 50, 51), kNativeBf16), one.slice(0, 50, 51)));
  EXPECT_EQ(error_of([&] { swiglu_forward(x.slice(1, 0, 5), kNativeBf16); }),
            "[swiglu] gate_up: wanted [T, 2 F] BFloat16, got [120, 5] BFloat16");
}

}  // namespace
}  // namespace banyan::ops
