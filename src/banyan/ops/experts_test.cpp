// Router, permute, grouped GEMM and unpermute against loops over tokens in fp64, over random
// shapes, and what they promise about bits.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "banyan/ops/expert_rows.h"
#include "banyan/ops/grouped_linear.h"
#include "banyan/ops/router.h"

namespace banyan::ops {
namespace {

const ComputeOptions kFp64 = {.dtype = at::kDouble};
const ComputeOptions kFp32 = {.dtype = at::kFloat};
const ComputeOptions kNative = {.dtype = at::kBFloat16};
const ComputeOptions kAten16 = {.dtype = at::kBFloat16, .kernels = Kernels::kAten};

class Draw {
 public:
  explicit Draw(uint64_t seed) : generator_(at::detail::createCPUGenerator(seed)), random_(seed) {}

  at::Tensor normal(at::IntArrayRef sizes, at::ScalarType dtype = at::kDouble) {
    return at::empty(sizes, at::kDouble).normal_(0.0, 1.0, generator_).to(dtype);
  }
  int64_t between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

 private:
  at::Generator generator_;
  std::mt19937_64 random_;
};

LinearWeight packed(const at::Tensor& master, const ComputeOptions& options) {
  LinearWeight weight;
  const bool wide = options.dtype == at::kDouble;
  pack_weight(master.to(wide ? at::kDouble : at::kFloat), options, /*with_backward=*/true, weight);
  return weight;
}

// A layer of experts without nonlinearity, with all its parts.
struct Layer {
  Layer(Draw& draw, const ComputeOptions& options)
      : tokens(draw.between(0, 40)),
        experts(draw.between(1, 9)),
        chosen(draw.between(1, experts)),
        in(draw.between(1, 70)),
        out(draw.between(1, 70)),
        router({.num_chosen = chosen, .renormalise = draw.between(0, 1) == 1}),
        h(draw.normal({tokens, in}, options.dtype)),
        gate_master(draw.normal({experts, in})),
        gate(packed(gate_master, options)) {
    for (int64_t e = 0; e < experts; ++e) {
      masters.push_back(draw.normal({out, in}).to(options.dtype).to(at::kDouble));
      weights.push_back(packed(masters.back(), options));
    }
    for (const LinearWeight& weight : weights) pointers.push_back(&weight);
  }

  int64_t tokens, experts, chosen, in, out;
  RouterOptions router;
  at::Tensor h;  // [T, in]
  at::Tensor gate_master;
  LinearWeight gate;
  std::vector<at::Tensor> masters;
  std::vector<LinearWeight> weights;
  ExpertWeights pointers;
};

double gap(const at::Tensor& got, const at::Tensor& wanted) {
  const at::Tensor difference = got.to(at::kDouble).sub(wanted.to(at::kDouble));
  const double scale = wanted.to(at::kDouble).norm().item<double>();
  return difference.norm().item<double>() / std::max(scale, 1e-30);
}

// Token by token: softmax, the k largest, the weighted sum of their products.
struct Reference {
  Reference(const Layer& layer, const Routing& routing)
      : weight(at::zeros({layer.tokens, layer.chosen}, at::kDouble)),
        y(at::zeros({layer.tokens, layer.out}, at::kDouble)) {
    const at::Tensor h = layer.h.to(at::kDouble);
    for (int64_t t = 0; t < layer.tokens; ++t) {
      std::vector<double> p(layer.experts);
      double sum = 0.0;
      for (int64_t e = 0; e < layer.experts; ++e) {
        sum += p[e] = std::exp(h[t].mul(layer.gate_master[e]).sum().item<double>());
      }
      for (double& value : p) value /= sum;
      std::vector<double> sorted = p;
      std::sort(sorted.rbegin(), sorted.rend());
      const double chosen_sum = std::accumulate(sorted.begin(), sorted.begin() + layer.chosen, 0.0);
      for (int64_t c = 0; c < layer.chosen; ++c) {
        const auto e = routing.choice[t][c].item<int64_t>();
        EXPECT_NEAR(p[e], sorted[c], 1e-12) << "token " << t << ", choice " << c;
        weight[t][c] = layer.router.renormalise ? p[e] / chosen_sum : p[e];
        y[t].add_(layer.masters[e].mv(h[t]).mul(weight[t][c]));
      }
    }
  }
  at::Tensor weight;
  at::Tensor y;
};

at::Tensor run(const Layer& layer, const Routing& routing, const ComputeOptions& options) {
  const ExpertRows rows = sort_by_expert(routing.choice, layer.experts);
  const at::Tensor products =
      grouped_linear_forward(permute(layer.h, rows), rows.offsets, layer.pointers);
  return unpermute(products, rows, routing_weights(routing, layer.router), {}, options);
}

TEST(Experts, EqualTheLoopOverTokens) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Draw draw(seed);
    const Layer layer(draw, kFp64);
    const Routing routing = route(layer.h, layer.gate, layer.router, kFp64);
    const Reference reference(layer, routing);
    if (layer.tokens == 0) continue;
    EXPECT_LT(gap(routing_weights(routing, layer.router), reference.weight), 1e-12);
    EXPECT_LT(gap(run(layer, routing, kFp64), reference.y), 1e-12) << seed;
  }
}

TEST(Experts, OtherTypesAreCloseToTheLoop) {
  for (uint64_t seed = 40; seed < 60; ++seed) {
    for (const ComputeOptions& options : {kFp32, kNative, kAten16}) {
      Draw draw(seed);
      const Layer layer(draw, options);
      if (layer.tokens == 0) continue;
      const Routing routing = route(layer.h, layer.gate, layer.router, options);
      EXPECT_EQ(routing.logits.scalar_type(), at::kFloat);
      // The weighted sum, given the choice and its weights.
      const at::Tensor weight = routing_weights(routing, layer.router).to(at::kDouble);
      at::Tensor y = at::zeros({layer.tokens, layer.out}, at::kDouble);
      for (int64_t t = 0; t < layer.tokens; ++t) {
        for (int64_t c = 0; c < layer.chosen; ++c) {
          const auto e = routing.choice[t][c].item<int64_t>();
          y[t].add_(layer.masters[e].mv(layer.h[t].to(at::kDouble)).mul(weight[t][c]));
        }
      }
      const double bound = options.dtype == at::kFloat ? 1e-5 : 1e-2;
      EXPECT_LT(gap(run(layer, routing, options), y), bound) << seed;
    }
  }
}

TEST(Experts, UnpermuteUndoesPermute) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (const ComputeOptions& options : {kFp64, kFp32, kNative, kAten16}) {
      Draw draw(seed);
      const Layer layer(draw, options);
      const Routing routing = route(layer.h, layer.gate, layer.router, options);
      const ExpertRows rows = sort_by_expert(routing.choice, layer.experts);
      ASSERT_EQ(rows.offsets.back(), layer.tokens * layer.chosen);
      for (int64_t e = 0; e < layer.experts; ++e) {
        for (int64_t r = rows.offsets[e]; r < rows.offsets[e + 1]; ++r) {
          const auto source = rows.source[r].item<int64_t>();
          EXPECT_EQ(routing.choice.flatten()[source].item<int64_t>(), e);
          EXPECT_EQ(rows.slot.flatten()[source].item<int64_t>(), r);
          EXPECT_EQ(rows.token[r].item<int64_t>(), source / layer.chosen);
          if (r > rows.offsets[e]) {  // stable
            EXPECT_LT(rows.source[r - 1].item<int64_t>(), source);
          }
        }
      }
      // Weights that are exact and sum to one: all of it on the first choice.
      at::Tensor weight = at::zeros({layer.tokens, layer.chosen}, at::kFloat);
      weight.select(1, 0).fill_(1.0);
      EXPECT_TRUE(unpermute(permute(layer.h, rows), rows, weight, {}, options).equal(layer.h));
      const at::Tensor residual = draw.normal(layer.h.sizes(), options.dtype);
      EXPECT_TRUE(unpermute(permute(layer.h, rows), rows, weight, residual, options)
                      .equal(layer.h.add(residual)));
    }
  }
}

// The bits of a token are those it has alone, whatever is routed beside it.
TEST(Experts, BitsOfATokenDoNotDependOnTheBatch) {
  const int threads = at::get_num_threads();
  for (const bool in_double : {false, true}) {
    Draw draw(7);
    const int64_t tokens = 130;
    const int64_t experts = 5;
    const int64_t width = 96;
    const RouterOptions router = {.num_chosen = 3, .renormalise = true, .in_double = in_double};
    const at::Tensor h = draw.normal({tokens, width}, at::kBFloat16);
    const LinearWeight gate = packed(draw.normal({experts, width}), kNative);
    std::vector<LinearWeight> weights;
    ExpertWeights pointers;
    for (int64_t e = 0; e < experts; ++e)
      weights.push_back(packed(draw.normal({70, width}), kNative));
    for (const LinearWeight& weight : weights) pointers.push_back(&weight);
    const auto forward = [&](const at::Tensor& rows_of) {
      const Routing routing = route(rows_of, gate, router, kNative);
      const ExpertRows rows = sort_by_expert(routing.choice, experts);
      return unpermute(grouped_linear_forward(permute(rows_of, rows), rows.offsets, pointers),
                       rows,
                       routing_weights(routing, router),
                       {},
                       kNative);
    };
    const at::Tensor together = forward(h);
    at::set_num_threads(1);
    EXPECT_TRUE(forward(h).equal(together));
    for (const int64_t count : {1, 2, 17, 64}) {
      for (int64_t first = 0; first + count <= tokens; first += 43) {
        EXPECT_TRUE(forward(h.narrow(0, first, count)).equal(together.narrow(0, first, count)));
      }
    }
    at::set_num_threads(threads);
  }
}

// d(sum of g w)/d(logits) and the two auxiliary losses by central differences in fp64.
TEST(Router, GradientsEqualFiniteDifferences) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    Draw draw(seed);
    const int64_t tokens = 6;
    const int64_t experts = draw.between(2, 7);
    const RouterOptions router = {.num_chosen = draw.between(1, experts),
                                  .renormalise = seed % 2 == 0};
    const at::Tensor logits = draw.normal({tokens, experts});
    Routing routing{logits, std::get<1>(logits.topk(router.num_chosen, -1))};
    const at::Tensor g = draw.normal({tokens, router.num_chosen});
    RouterPenalty penalty;
    penalty.multiplicity = at::empty({tokens}, at::kDouble);
    for (int64_t t = 0; t < tokens; ++t) penalty.multiplicity[t] = draw.between(1, 4);
    penalty.slope = draw.normal({experts});
    penalty.z_slope = 0.3;
    const auto value = [&](const at::Tensor& z) {
      const Routing moved{z, routing.choice};
      const at::Tensor m = penalty.multiplicity.unsqueeze(1);
      const at::Tensor chosen = routing_weights(moved, router).mul(g).sum();
      const at::Tensor balance = z.softmax(-1).mul(penalty.slope).mul(m).sum();
      const at::Tensor lse = z.logsumexp(1, true).square().mul(m).sum();
      return chosen.item<double>() + balance.item<double>() +
             lse.item<double>() * penalty.z_slope / 2;
    };
    const at::Tensor grad = routing_backward(routing, g, router, &penalty);
    constexpr double kStep = 1e-5;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t e = 0; e < experts; ++e) {
        at::Tensor up = logits.clone();
        at::Tensor down = logits.clone();
        up[t][e] += kStep;
        down[t][e] -= kStep;
        EXPECT_NEAR(grad[t][e].item<double>(), (value(up) - value(down)) / (2 * kStep), 1e-7);
      }
    }
  }
}

TEST(GroupedLinear, GradientsAreThoseOfEachExpertAlone) {
  for (const ComputeOptions& options : {kFp64, kFp32, kNative, kAten16}) {
    Draw draw(3);
    const std::vector<int64_t> offsets = {0, 0, 5, 5, 75, 80};  // the first and third have none
    std::vector<LinearWeight> weights;
    ExpertWeights pointers;
    for (int64_t e = 0; e < 5; ++e) weights.push_back(packed(draw.normal({48, 64}), options));
    for (const LinearWeight& weight : weights) pointers.push_back(&weight);
    const at::Tensor x = draw.normal({80, 64}, options.dtype);
    const at::Tensor dy = draw.normal({80, 48}, options.dtype);
    const at::ScalarType wide = options.dtype == at::kDouble ? at::kDouble : at::kFloat;
    std::vector<at::Tensor> grads(5);
    std::vector<at::Tensor*> grad_pointers;
    for (at::Tensor& grad : grads) {
      grad = at::full({48, 64}, 0.5, wide);
      grad_pointers.push_back(&grad);
    }
    const at::Tensor y = grouped_linear_forward(x, offsets, pointers);
    const at::Tensor dx = grouped_linear_backward_input(dy, offsets, pointers);
    grouped_linear_backward_weight(dy, x, offsets, grad_pointers, options);
    for (int64_t e = 0; e < 5; ++e) {
      const int64_t count = offsets[e + 1] - offsets[e];
      at::Tensor grad = at::full({48, 64}, 0.5, wide);
      if (count > 0) {
        const at::Tensor rows = x.narrow(0, offsets[e], count);
        const at::Tensor grad_rows = dy.narrow(0, offsets[e], count);
        EXPECT_LT(gap(y.narrow(0, offsets[e], count), linear_forward(rows, weights[e], {})), 1e-6);
        EXPECT_LT(
            gap(dx.narrow(0, offsets[e], count), linear_backward_input(grad_rows, weights[e])),
            1e-6);
        linear_backward_weight(grad_rows, rows, grad, {}, options);
      }
      EXPECT_TRUE(grad.equal(grads[e])) << e;
    }
  }
}

template <typename Run>
std::string message(const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(Experts, BadInputIsNamed) {
  Draw draw(1);
  const LinearWeight gate = packed(draw.normal({4, 8}), kFp32);
  const at::Tensor h = draw.normal({3, 8}, at::kFloat);
  EXPECT_NE(message([&] { route(h, gate, {.num_chosen = 5}, kFp32); }).find("wanted 1 to 4, got 5"),
            std::string::npos);
  EXPECT_NE(message([&] {
              route(draw.normal({3, 7}, at::kFloat), gate, {.num_chosen = 1}, kFp32);
            }).find("[router] h"),
            std::string::npos);
  EXPECT_NE(message([&] {
              sort_by_expert(at::full({2, 1}, 4, at::kLong), 4);
            }).find("[experts] choice: wanted experts in [0, 4), got 4"),
            std::string::npos);
  EXPECT_NE(message([&] {
              grouped_linear_forward(h, {0, 2}, {&gate});
            }).find("[grouped_linear] x: wanted shape [2, 8]"),
            std::string::npos);
}

}  // namespace
}  // namespace banyan::ops
