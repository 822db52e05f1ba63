// The whole model through trie attention and edge log-probabilities: gradients against finite
// differences in fp64, bits against an unshared trie in bf16, memory of what a forward keeps.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "banyan/models/test_models.h"
#include "banyan/testing/random_trie.h"

namespace banyan::models {
namespace {

const ComputeOptions kFp64 = {.dtype = at::kDouble};
const ComputeOptions kBf16 = {.dtype = at::kBFloat16};

// Runs a scope on the given number of threads.
class Threads {
 public:
  explicit Threads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }

 private:
  int before_;
};

at::Tensor normal(at::IntArrayRef sizes, uint64_t seed) {
  return at::empty(sizes, at::kDouble).normal_(0.0, 1.0, at::detail::createCPUGenerator(seed));
}

// L = sum_x w_x logprob_x + sum_r c_r entropy_r at temperature 0.7, and its gradients.
struct Loss {
  static constexpr double kTemperature = 0.7;

  Loss(CausalLM& model, Batch& batch)
      : model(model),
        batch(batch),
        edge_weight(normal({static_cast<int64_t>(batch.edges.token.size())}, 11)),
        row_weight(normal({static_cast<int64_t>(batch.edges.source.size())}, 12)) {}

  ops::EdgeLogprob score(const at::Tensor& hidden) {
    return ops::edge_logprob_forward(
        hidden, model.head(), batch.index(), kTemperature, true, model.options());
  }

  double value() {
    const at::Tensor hidden =
        model.forward(batch.ids(), batch.positions(), batch.attention, nullptr);
    const ops::EdgeLogprob out = score(hidden.index_select(0, batch.sources()));
    return out.logprob.mul(edge_weight).sum().add(out.entropy.mul(row_weight).sum()).item<double>();
  }

  void accumulate_gradients() {
    model.params().ensure_grads();
    model.params().zero_grads();
    std::unique_ptr<Saved> saved;
    const at::Tensor hidden =
        model.forward(batch.ids(), batch.positions(), batch.attention, &saved);
    const at::Tensor rows = hidden.index_select(0, batch.sources());
    const at::Tensor grad_rows = ops::edge_logprob_backward(rows,
                                                            model.head(),
                                                            batch.index(),
                                                            score(rows),
                                                            edge_weight,
                                                            row_weight,
                                                            kTemperature,
                                                            model.head_grad(),
                                                            model.options());
    const at::Tensor grad_hidden = at::zeros(hidden.sizes(), hidden.options());
    grad_hidden.index_add_(0, batch.sources(), grad_rows);
    model.backward(std::move(saved), grad_hidden, batch.attention);
  }

  CausalLM& model;
  Batch& batch;
  at::Tensor edge_weight;
  at::Tensor row_weight;
};

// The analytic and the numeric derivative of the loss along a random direction of `params`. Two
// central differences cancel the third-order term.
void expect_derivative(Loss& loss,
                       const std::vector<Param*>& params,
                       uint64_t seed,
                       const std::string& what) {
  constexpr double kStep = 1e-5;
  std::vector<at::Tensor> start;
  std::vector<at::Tensor> direction;
  double analytic = 0;
  for (Param* param : params) {
    start.push_back(param->master.clone());
    direction.push_back(normal(param->master.sizes(), ++seed));
    analytic += param->grad.mul(direction.back()).sum().item<double>();
    EXPECT_GT(param->grad.abs().sum().item<double>(), 0.0) << what << " " << param->name;
  }
  const auto at_distance = [&](double distance) {
    for (size_t i = 0; i < params.size(); ++i) {
      params[i]->master.copy_(start[i].add(direction[i], distance));
    }
    loss.model.params().repack();
    return loss.value();
  };
  const double near = (at_distance(kStep) - at_distance(-kStep)) / (2 * kStep);
  const double far = (at_distance(2 * kStep) - at_distance(-2 * kStep)) / (4 * kStep);
  at_distance(0);
  const double numeric = (4 * near - far) / 3;
  EXPECT_NEAR(analytic, numeric, 1e-7 * std::max(1.0, std::abs(numeric))) << what;
}

// Every parameter of the first layer and outside the layers by itself, those of the second layer
// together.
TEST(DecoderLM, GradientsEqualFiniteDifferences) {
  const Threads one(1);  // hundreds of tiny passes
  for (const auto& [name, config] : tiny_configs()) {
    const auto model = random_model(config, /*seed=*/3, {kFp64, true});
    Batch batch(testing::toy_samples(), /*share=*/true, kFp64);
    Loss loss(*model, batch);
    loss.accumulate_gradients();
    std::vector<Param*> second_layer;
    uint64_t seed = 100;
    for (Param& param : model->params().params()) {
      if (param.name.starts_with("model.layers.1.")) {
        second_layer.push_back(&param);
      } else {
        expect_derivative(loss, {&param}, seed += 100, name + " " + param.name);
      }
    }
    expect_derivative(loss, second_layer, seed += 100, name + " second layer");
  }
}

TEST(DecoderLM, GradientsAddUpOverCalls) {
  const auto model = random_model(tiny_configs()[0].second, 3, {kFp64, true});
  Batch batch(testing::toy_samples(), true, kFp64);
  Loss loss(*model, batch);
  loss.accumulate_gradients();
  const at::Tensor once = model->params().at("model.layers.1.mlp.up_proj.weight").grad.clone();
  std::unique_ptr<Saved> saved;
  const at::Tensor hidden = model->forward(batch.ids(), batch.positions(), batch.attention, &saved);
  model->backward(std::move(saved), at::zeros(hidden.sizes(), hidden.options()), batch.attention);
  EXPECT_TRUE(model->params().at("model.layers.1.mlp.up_proj.weight").grad.equal(once));
}

TEST(DecoderLM, KeepingActivationsDoesNotChangeTheForward) {
  for (const ComputeOptions& options : {kFp64, kBf16}) {
    const auto model = random_model(tiny_configs()[4].second, 3, {options, true});
    Batch batch(testing::toy_samples(), true, options);
    std::unique_ptr<Saved> saved;
    const at::Tensor kept = model->forward(batch.ids(), batch.positions(), batch.attention, &saved);
    const at::Tensor plain =
        model->forward(batch.ids(), batch.positions(), batch.attention, nullptr);
    EXPECT_TRUE(kept.equal(plain));
  }
}

// Per logical token, in order: log-probability bits.
at::Tensor logical_bits(CausalLM& model, Batch& batch, const ComputeOptions& options) {
  const at::Tensor hidden = model.forward(batch.ids(), batch.positions(), batch.attention, nullptr);
  if (batch.edges.source.empty()) return at::empty({0}, at::kFloat);
  const at::Tensor logprob =
      ops::edge_logprob_forward(
          hidden.index_select(0, batch.sources()), model.head(), batch.index(), 1.0, false, options)
          .logprob;
  return logprob.index_select(0, at::tensor(batch.logical.edge, at::kInt).to(at::kLong));
}

TEST(DecoderLM, Bf16ForwardBitsDoNotDependOnSharing) {
  for (const auto& [name, config] : tiny_configs()) {
    const auto model = random_model(config, 5, {kBf16, false});
    for (const testing::TrieCase& test : testing::trie_cases(/*seed=*/1, /*vocab=*/37)) {
      if (test.name == "positions_with_gaps" && name == "llama_yarn") continue;
      Batch shared(test.samples, true, kBf16);
      Batch dense(test.samples, false, kBf16);
      const at::Tensor a = logical_bits(*model, shared, kBf16);
      const at::Tensor b = logical_bits(*model, dense, kBf16);
      ASSERT_EQ(a.numel(), b.numel());
      EXPECT_EQ(std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()), 0) << name << " " << test.name;
    }
  }
}

TEST(DecoderLM, Bf16GradientsAreCloseToFp64OnesOnAnyNumberOfThreads) {
  for (const auto& [name, config] : tiny_configs()) {
    const auto exact = random_model(config, 5, {kFp64, true});
    const auto model = random_model(config, 5, {kBf16, true});
    Batch exact_batch(testing::toy_samples(), true, kFp64);
    Batch batch(testing::toy_samples(), true, kBf16);
    Loss(*exact, exact_batch).accumulate_gradients();
    Loss loss(*model, batch);
    loss.edge_weight = loss.edge_weight.to(at::kFloat);
    loss.row_weight = loss.row_weight.to(at::kFloat);
    std::vector<at::Tensor> first;
    {
      const Threads one(1);
      loss.accumulate_gradients();
    }
    for (const Param& param : model->params().params()) {
      const at::Tensor truth = exact->params().at(param.name).grad;
      first.push_back(param.grad.clone());
      if (truth.count_nonzero().item<int64_t>() == 0) {  // an expert that no token chooses
        EXPECT_EQ(param.grad.count_nonzero().item<int64_t>(), 0) << name << " " << param.name;
        continue;
      }
      const double error =
          param.grad.to(at::kDouble).sub(truth).norm().item<double>() / truth.norm().item<double>();
      // A router's gradient is made of differences of nearly equal numbers.
      const double bound = param.name.ends_with("mlp.gate.weight") ? 0.2 : 0.1;
      EXPECT_LT(error, bound) << name << " " << param.name;
      EXPECT_EQ(param.grad.scalar_type(), at::kFloat);
    }
    const Threads two(2);
    loss.accumulate_gradients();
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_TRUE(model->params().params()[i].grad.equal(first[i]))
          << name << " " << model->params().params()[i].name;
    }
  }
}

TEST(DecoderLM, TiedHeadIsTheEmbedding) {
  const auto tied = random_model(tiny_configs()[0].second, 1, {kFp64, true});
  EXPECT_FALSE(tied->params().contains("lm_head.weight"));
  tied->params().ensure_grads();
  tied->head_grad().fill_(1.0);
  EXPECT_EQ(tied->params().at("model.embed_tokens.weight").grad.sum().item<double>(), 37 * 32);
  const auto untied = random_model(tiny_configs()[4].second, 1, {kFp64, true});
  EXPECT_TRUE(untied->params().contains("lm_head.weight"));
  EXPECT_TRUE(tied->shape().tied && !untied->shape().tied);
}

TEST(DecoderLM, BadInputIsNamed) {
  const auto model = random_model(tiny_configs()[0].second, 1, {kFp64, true});
  Batch batch(samples_of({{1, 2, 37}}), true, kFp64);
  EXPECT_THROW(model->forward(batch.ids(), batch.positions(), batch.attention, nullptr),
               std::invalid_argument);
  Batch good(samples_of({{1, 2, 3}}), true, kFp64);
  EXPECT_THROW(model->forward(good.ids(), at::zeros({2}, at::kInt), good.attention, nullptr),
               std::invalid_argument);
  EXPECT_THROW(model->backward(nullptr, at::zeros({3, 32}, at::kDouble), good.attention),
               std::logic_error);
}

}  // namespace
}  // namespace banyan::models
