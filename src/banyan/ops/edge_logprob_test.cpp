#include "banyan/ops/edge_logprob.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

namespace banyan::ops {
namespace {

const ComputeOptions kNative{at::kBFloat16, at::kCPU, Kernels::kNative};
const ComputeOptions kAten16{at::kBFloat16, at::kCPU, Kernels::kAten};
const ComputeOptions kFloat32{at::kFloat, at::kCPU, Kernels::kNative};
const ComputeOptions kFloat64{at::kDouble, at::kCPU, Kernels::kNative};

double relative(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor wide = want.to(at::kDouble);
  return (got.to(at::kDouble) - wide).norm().item<double>() / (wide.norm().item<double>() + 1e-300);
}

double furthest(const at::Tensor& got, const at::Tensor& want) {
  return (got.to(at::kDouble) - want.to(at::kDouble)).abs().max().item<double>();
}

std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

// A head problem with 0 to 3 edges a row, some of them on the same token.
struct Problem {
  Problem(int64_t rows, int64_t width, int64_t vocabulary, const ComputeOptions& compute)
      : options(compute) {
    const at::ScalarType wide = compute.dtype == at::kDouble ? at::kDouble : at::kFloat;
    master = at::randn({vocabulary, width}, wide) * 0.3;
    hidden = at::randn({rows, width}, at::kDouble).to(compute.dtype);
    std::vector<int32_t> offsets = {0};
    for (int64_t r = 0; r < rows; ++r)
      offsets.push_back(offsets.back() + static_cast<int32_t>((r * 7 + 1) % 4));
    index.row_offsets = at::tensor(offsets, at::kInt);
    index.token = at::randint(0, vocabulary, {offsets.back()}, at::kInt);
    if (offsets.back() > 2) index.token[2] = index.token[1].item<int32_t>();
    grad_logprob = at::randn({offsets.back()}, wide);
    grad_entropy = at::randn({rows}, wide);
    pack_weight(master, compute, /*with_backward=*/true, head);
  }

  EdgeLogprob forward(double temperature, bool with_entropy) const {
    return edge_logprob_forward(hidden, head, index, temperature, with_entropy, options);
  }
  // d(hidden), and dW from zero.
  std::vector<at::Tensor> backward(double temperature, bool with_entropy) const {
    at::Tensor grad = at::zeros_like(master);
    const at::Tensor dh = edge_logprob_backward(hidden,
                                                head,
                                                index,
                                                forward(temperature, with_entropy),
                                                grad_logprob,
                                                with_entropy ? grad_entropy : at::Tensor(),
                                                temperature,
                                                grad,
                                                options);
    return {dh, grad};
  }

  ComputeOptions options;
  at::Tensor master, hidden, grad_logprob, grad_entropy;
  LinearWeight head;
  EdgeIndex index;
};

// The same numbers by autograd through a full [R, V] log-softmax. The logits are computed in
// logit_dtype, the rest in fp64 (fp32 for bf16 logits).
struct Autograd {
  at::Tensor logprob, entropy, grad_hidden, grad_weight;
};

Autograd by_autograd(const Problem& p,
                     double temperature,
                     bool with_entropy,
                     at::ScalarType logit_dtype) {
  const at::ScalarType wide = logit_dtype == at::kBFloat16 ? at::kFloat : at::kDouble;
  const at::Tensor h = p.hidden.to(logit_dtype).clone().set_requires_grad(true);
  const at::Tensor w = p.master.to(p.options.dtype).to(logit_dtype).clone().set_requires_grad(true);
  const at::Tensor log_p = at::log_softmax(at::linear(h, w).to(wide) / temperature, 1);
  std::vector<int64_t> places;
  for (int64_t r = 0; r < p.hidden.size(0); ++r) {
    for (int32_t x = p.index.row_offsets[r].item<int32_t>();
         x < p.index.row_offsets[r + 1].item<int32_t>();
         ++x) {
      places.push_back(r * p.head.out + p.index.token[x].item<int32_t>());
    }
  }
  Autograd out;
  const at::Tensor logprob = log_p.reshape({-1}).index_select(0, at::tensor(places, at::kLong));
  const at::Tensor entropy = (log_p.exp() * log_p).sum(1).neg();
  at::Tensor loss = (logprob * p.grad_logprob.to(wide)).sum();
  if (with_entropy) loss = loss + (entropy * p.grad_entropy.to(wide)).sum();
  loss.backward();
  return {logprob.detach(), entropy.detach(), h.grad(), w.grad()};
}

class EdgeLogprobTest : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(11); }
};

TEST_F(EdgeLogprobTest, Fp64EqualsAutograd) {
  for (const bool with_entropy : {false, true}) {
    for (const double temperature : {1.0, 0.7}) {
      const Problem p(300, 24, 130, kFloat64);  // two chunks of rows
      const EdgeLogprob got = p.forward(temperature, with_entropy);
      const std::vector<at::Tensor> gradients = p.backward(temperature, with_entropy);
      const Autograd want = by_autograd(p, temperature, with_entropy, at::kDouble);
      EXPECT_LE(furthest(got.logprob, want.logprob), 1e-12);
      EXPECT_EQ(got.entropy.defined(), with_entropy);
      if (with_entropy) {
        EXPECT_LE(furthest(got.entropy, want.entropy), 1e-12);
      }
      EXPECT_LE(relative(gradients[0], want.grad_hidden), 1e-12);
      EXPECT_LE(relative(gradients[1], want.grad_weight), 1e-12);
    }
  }
}

struct Size {
  int64_t rows, width, vocabulary;
};
// Whole tiles; ragged in every direction; more rows than one backward chunk; several segments.
const std::vector<Size> kSizes = {{64, 64, 512}, {37, 33, 4999}, {1100, 70, 300}, {5, 64, 9001}};

TEST_F(EdgeLogprobTest, NativeEqualsAutogradOnTheRoundedInputs) {
  for (const auto [rows, width, vocabulary] : kSizes) {
    for (const bool with_entropy : {false, true}) {
      const Problem p(rows, width, vocabulary, kNative);
      const double temperature = with_entropy ? 0.8 : 1.0;
      const EdgeLogprob got = p.forward(temperature, with_entropy);
      const std::vector<at::Tensor> gradients = p.backward(temperature, with_entropy);
      const Autograd want = by_autograd(p, temperature, with_entropy, at::kDouble);
      const std::string at =
          std::to_string(rows) + " x " + std::to_string(width) + " x " + std::to_string(vocabulary);
      EXPECT_LE(furthest(got.logprob, want.logprob), 1e-5) << at;
      if (with_entropy) {
        EXPECT_LE(furthest(got.entropy, want.entropy), 1e-5) << at;
      }
      EXPECT_LE(relative(gradients[0], want.grad_hidden), 4e-3) << at;
      EXPECT_LE(relative(gradients[1], want.grad_weight), 4e-3) << at;
    }
  }
}

TEST_F(EdgeLogprobTest, NativeEqualsItsTwin) {
  const Problem native(100, 64, 1000, kNative);
  Problem plain = native;
  plain.options = kAten16;
  plain.head = {};
  pack_weight(plain.master, kAten16, true, plain.head);
  EXPECT_LE(furthest(native.forward(0.9, true).logprob, plain.forward(0.9, true).logprob), 1e-5);
  EXPECT_LE(furthest(native.forward(0.9, true).entropy, plain.forward(0.9, true).entropy), 1e-5);
  EXPECT_LE(relative(native.backward(0.9, true)[0], plain.backward(0.9, true)[0]), 5e-3);
  EXPECT_LE(relative(native.backward(0.9, true)[1], plain.backward(0.9, true)[1]), 5e-3);
}

// A16: not further from fp64 than a bf16 linear, log-softmax in fp32, and autograd through them.
TEST_F(EdgeLogprobTest, Bf16ErrorIsNotAboveLibTorchs) {
  std::vector<double> logprob, hidden, weight;
  for (int seed = 0; seed < 5; ++seed) {
    const Problem p(80, 192, 1500, kNative);
    const Autograd want = by_autograd(p, 1.0, false, at::kDouble);
    const Autograd torch = by_autograd(p, 1.0, false, at::kBFloat16);
    const std::vector<at::Tensor> gradients = p.backward(1.0, false);
    logprob.push_back(furthest(p.forward(1.0, false).logprob, want.logprob) /
                      furthest(torch.logprob, want.logprob));
    hidden.push_back(relative(gradients[0], want.grad_hidden) /
                     relative(torch.grad_hidden, want.grad_hidden));
    weight.push_back(relative(gradients[1], want.grad_weight) /
                     relative(torch.grad_weight, want.grad_weight));
  }
  for (std::vector<double>* ratios : {&logprob, &hidden, &weight}) {
    std::nth_element(ratios->begin(), ratios->begin() + 2, ratios->end());
    EXPECT_LE((*ratios)[2], 1.05);
  }
}

TEST_F(EdgeLogprobTest, RowBitsDependOnTheRowAlone) {
  const int threads = at::get_num_threads();
  for (const auto [rows, width, vocabulary] : kSizes) {
    const Problem whole(rows, width, vocabulary, kNative);
    const EdgeLogprob want = whole.forward(0.9, true);
    EXPECT_TRUE(at::equal(whole.forward(0.9, false).logprob, want.logprob));
    for (const int64_t first : {int64_t{0}, rows / 3, rows - 1}) {
      for (const int64_t count : {1, 2, 17}) {
        if (first + count > rows) continue;
        Problem part = whole;
        const int32_t begin = whole.index.row_offsets[first].item<int32_t>();
        part.hidden = whole.hidden.slice(0, first, first + count);
        part.index.row_offsets =
            (whole.index.row_offsets.slice(0, first, first + count + 1) - begin).contiguous();
        const int64_t edges = part.index.row_offsets[count].item<int32_t>();
        part.index.token = whole.index.token.slice(0, begin, begin + edges);
        at::set_num_threads(count == 2 ? 1 : threads);
        const EdgeLogprob got = part.forward(0.9, true);
        EXPECT_TRUE(at::equal(got.logprob, want.logprob.slice(0, begin, begin + edges)));
        EXPECT_TRUE(at::equal(got.lse, want.lse.slice(0, first, first + count)));
        EXPECT_TRUE(at::equal(got.entropy, want.entropy.slice(0, first, first + count)));
      }
    }
    at::set_num_threads(threads);
  }
}

TEST_F(EdgeLogprobTest, ThreadsDoNotChangeGradients) {
  const int threads = at::get_num_threads();
  for (const auto [rows, width, vocabulary] : kSizes) {
    const Problem p(rows, width, vocabulary, kNative);
    const std::vector<at::Tensor> want = p.backward(1.0, true);
    at::set_num_threads(1);
    const std::vector<at::Tensor> got = p.backward(1.0, true);
    at::set_num_threads(threads);
    EXPECT_TRUE(at::equal(got[0], want[0]));
    EXPECT_TRUE(at::equal(got[1], want[1]));
  }
}

// What a memory holds changes neither the forward nor, whoever used it in between, the gradients.
TEST_F(EdgeLogprobTest, KeptProbabilitiesGiveTheSameBitsWheneverTheyWereKept) {
  const int threads = at::get_num_threads();
  for (const auto [rows, width, vocabulary] : kSizes) {
    const Problem p(rows, width, vocabulary, kNative);
    const Autograd want = by_autograd(p, 0.8, false, at::kDouble);
    HeadMemory memory;
    const auto forward = [&] {
      return edge_logprob_forward(p.hidden, p.head, p.index, 0.8, true, kNative, &memory);
    };
    const auto backward = [&](const EdgeLogprob& from, const at::Tensor& grad_entropy) {
      at::Tensor grad = at::zeros_like(p.master);
      const at::Tensor dh = edge_logprob_backward(p.hidden,
                                                  p.head,
                                                  p.index,
                                                  from,
                                                  p.grad_logprob,
                                                  grad_entropy,
                                                  0.8,
                                                  grad,
                                                  kNative,
                                                  &memory);
      return std::vector<at::Tensor>{dh, grad};
    };
    const EdgeLogprob first = forward();
    EXPECT_TRUE(at::equal(first.logprob, p.forward(0.8, true).logprob));
    EXPECT_TRUE(at::equal(first.entropy, p.forward(0.8, true).entropy));
    const std::vector<at::Tensor> kept = backward(first, {});
    EXPECT_LE(relative(kept[0], want.grad_hidden), 5e-3);
    EXPECT_LE(relative(kept[1], want.grad_weight), 5e-3);
    at::set_num_threads(1);
    const std::vector<at::Tensor> alone = backward(forward(), {});
    at::set_num_threads(threads);
    EXPECT_TRUE(at::equal(alone[0], kept[0]));
    EXPECT_TRUE(at::equal(alone[1], kept[1]));

    Problem other = p;  // another forward takes the memory: the first one's backward fills it again
    other.hidden = p.hidden.neg();
    edge_logprob_forward(other.hidden, p.head, p.index, 0.8, true, kNative, &memory);
    const std::vector<at::Tensor> again = backward(first, {});
    EXPECT_TRUE(at::equal(again[0], kept[0]));
    EXPECT_TRUE(at::equal(again[1], kept[1]));
    EXPECT_TRUE(at::equal(backward(forward(), p.grad_entropy)[0], p.backward(0.8, true)[0]));
  }
}

TEST_F(EdgeLogprobTest, MemoryHoldsWholeTilesOfTheFirstRows) {
  HeadMemory memory;
  const int64_t vocabulary = 1 << 17;  // 512 tiles of 576 bytes a row
  const kernels::KeptProbabilities kept = memory.hold(1000, vocabulary);
  EXPECT_EQ(kept.rows, 896);
  EXPECT_EQ(memory.held(1).rows, 896);
  EXPECT_EQ(memory.held(0).rows, 0);
  EXPECT_EQ(memory.hold(70, 300).rows, 70);
  EXPECT_EQ(memory.held(1).rows, 0);
}

// Rollout: logits of the rows that sample, then the log-probability of what was drawn.
TEST_F(EdgeLogprobTest, SampledLogprobHasTheBitsOfScoring) {
  for (const auto [rows, width, vocabulary] : kSizes) {
    for (const double temperature : {1.0, 0.6}) {
      Problem p(rows, width, vocabulary, kNative);
      std::vector<int32_t> offsets(rows + 1);
      for (int64_t r = 0; r <= rows; ++r) offsets[r] = static_cast<int32_t>(r);
      p.index.row_offsets = at::tensor(offsets, at::kInt);
      p.index.token = at::randint(0, vocabulary, {rows}, at::kInt);
      const at::Tensor logits = head_logits(p.hidden, p.head, kNative);
      EXPECT_EQ(logits.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(logits_logprob(logits, p.index.token, temperature, kNative),
                            p.forward(temperature, false).logprob));
    }
  }
  const Problem p(9, 24, 130, kFloat64);
  const at::Tensor token = at::randint(0, 130, {9}, at::kInt);
  const at::Tensor want = at::log_softmax(at::linear(p.hidden, p.master) / 0.6, 1);
  const at::Tensor got =
      logits_logprob(head_logits(p.hidden, p.head, kFloat64), token, 0.6, kFloat64);
  EXPECT_LE(furthest(got, want.gather(1, token.to(at::kLong).unsqueeze(1)).squeeze(1)), 1e-12);
}

TEST_F(EdgeLogprobTest, GradientsAddToWhatIsThere) {
  for (const ComputeOptions& options : {kNative, kFloat32}) {
    const Problem p(20, 32, 200, options);
    const EdgeLogprob forward = p.forward(1.0, false);
    at::Tensor grad = at::zeros_like(p.master).fill_(3.0);
    edge_logprob_backward(
        p.hidden, p.head, p.index, forward, p.grad_logprob, {}, 1.0, grad, options);
    EXPECT_LE(furthest(grad - 3.0, p.backward(1.0, false)[1]), 1e-6);
    // Without any gradient nothing changes.
    const at::Tensor dh =
        edge_logprob_backward(p.hidden, p.head, p.index, forward, {}, {}, 1.0, grad, options);
    EXPECT_EQ(dh.abs().max().item<float>(), 0.0f);
  }
}

TEST_F(EdgeLogprobTest, NoRowsAndRowsWithoutEdges) {
  for (const ComputeOptions& options : {kNative, kFloat32}) {
    const Problem none(0, 32, 200, options);
    EXPECT_EQ(none.forward(1.0, true).logprob.numel(), 0);
    EXPECT_EQ(none.backward(1.0, true)[0].sizes(), at::IntArrayRef({0, 32}));
    EXPECT_EQ(head_logits(none.hidden, none.head, options).sizes(), at::IntArrayRef({0, 200}));
    Problem bare(3, 32, 200, options);
    bare.index.row_offsets = at::zeros({4}, at::kInt);
    bare.index.token = at::zeros({0}, at::kInt);
    bare.grad_logprob = at::zeros({0}, at::kFloat);
    EXPECT_EQ(bare.forward(1.0, true).logprob.numel(), 0);
    EXPECT_GT(bare.forward(1.0, true).entropy.min().item<float>(), 0.0f);
    EXPECT_GT(bare.backward(1.0, true)[0].abs().max().item<float>(), 0.0f);
  }
}

TEST_F(EdgeLogprobTest, NotANumberStaysInItsRow) {
  Problem p(20, 32, 5000, kNative);
  const EdgeLogprob clean = p.forward(1.0, true);
  p.hidden[4][0] = NAN;
  const EdgeLogprob dirty = p.forward(1.0, true);
  EXPECT_TRUE(std::isnan(dirty.lse[4].item<float>()));
  EXPECT_TRUE(std::isnan(dirty.entropy[4].item<float>()));
  EXPECT_TRUE(at::equal(dirty.lse.slice(0, 5), clean.lse.slice(0, 5)));
}

TEST_F(EdgeLogprobTest, BadInputIsNamed) {
  for (const ComputeOptions& options : {kNative, kFloat32}) {
    Problem p(3, 32, 200, options);
    EXPECT_EQ(message([&] { p.forward(0.0, false); }),
              "[edge_logprob] temperature: wanted > 0, got 0");
    p.index.token[0] = 200;
    EXPECT_EQ(message([&] { p.forward(1.0, false); }),
              "[edge_logprob] token 0: wanted an id in [0, 200), got 200");
    p.index.token[0] = 0;
    const EdgeIndex good = p.index;
    p.index.row_offsets = at::tensor({0, 4, 2, 5}, at::kInt);
    p.index.token = at::zeros({5}, at::kInt);
    EXPECT_EQ(message([&] { p.forward(1.0, false); }),
              "[edge_logprob] row_offsets: wanted ascending from 0 to 5 edges");
    p.index = good;
    p.hidden = p.hidden.slice(1, 0, 31);
    EXPECT_NE(message([&] { p.forward(1.0, false); }).find("[edge_logprob] hidden: wanted"),
              std::string::npos);
    EXPECT_EQ(message([&] {
                logits_logprob(at::zeros({1, 5}), at::tensor({5}, at::kInt), 1.0, options);
              }),
              "[edge_logprob] token 0: wanted an id in [0, 5), got 5");
  }
}

}  // namespace
}  // namespace banyan::ops
