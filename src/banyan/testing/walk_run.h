// One walk with a loss of its own, and what came of it: for tests of walk() in one process and over
// several ranks.
#pragma once

#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "banyan/core/rng.h"
#include "banyan/models/test_models.h"
#include "banyan/train/walk.h"

namespace banyan::testing {

inline constexpr int32_t kVocab = 37;  // of the tiny configurations
inline const ComputeOptions kFp64 = {.dtype = at::kDouble};
inline const ComputeOptions kFp32 = {.dtype = at::kFloat};
inline const ComputeOptions kBf16 = {.dtype = at::kBFloat16};
inline const train::HeadSpec kHead = {.temperature = 0.7, .with_entropy = true};

inline std::unique_ptr<models::CausalLM> model_of(
    size_t which,
    const ComputeOptions& options,
    models::HeadKind head = models::HeadKind::kVocabulary) {
  const auto configs = models::tiny_configs();
  return models::random_model(configs[which % configs.size()].second,
                              /*seed=*/7,
                              {.compute = options, .with_backward = true, .head = head});
}

// What a walk gave.
struct Outcome {
  double loss = 0.0;
  std::map<std::string, at::Tensor> gradients;
  std::map<int32_t, at::Tensor> value, entropy;  // per sample
  int64_t num_calls = 0;
  train::WalkStats stats;
};

// A number that belongs to (sample, what).
inline double draw(int32_t sample, uint64_t what) {
  return static_cast<double>(philox(3, static_cast<uint64_t>(sample), what)[0]) / 4294967296.0 -
         0.5;
}

// Sample scope: L = sum_s a_s exp(mean_u value_u) + sum_u c_s entropy_u. Mini-batch scope: the
// square of sum_s a_s mean_u value_u.
inline train::TokenGradients loss_of(const std::vector<int32_t>& samples,
                                     const train::TokenOutputs& outputs,
                                     train::LossScope scope,
                                     double& loss) {
  train::TokenGradients gradients{at::zeros_like(outputs.value), {}};
  if (outputs.entropy.defined()) gradients.entropy = at::zeros_like(outputs.entropy);
  double total = 0.0;
  std::vector<double> slope(samples.size());
  for (size_t k = 0; k < samples.size(); ++k) {
    const int64_t begin = outputs.offsets[k];
    const int64_t length = outputs.offsets[k + 1] - begin;
    if (length == 0) continue;
    const double mean =
        outputs.value.narrow(0, begin, length).to(at::kDouble).mean().item<double>();
    const double a = draw(samples[k], 1);
    const bool alone = scope == train::LossScope::kSample;
    loss += alone ? a * std::exp(mean) : 0.0;
    total += a * mean;
    slope[k] = (alone ? a * std::exp(mean) : a) / static_cast<double>(length);
    if (outputs.entropy.defined()) {
      const double c = draw(samples[k], 2);
      loss += c * outputs.entropy.narrow(0, begin, length).to(at::kDouble).sum().item<double>();
      gradients.entropy.narrow(0, begin, length).fill_(c);
    }
  }
  if (scope == train::LossScope::kMiniBatch) loss += total * total;
  for (size_t k = 0; k < samples.size(); ++k) {
    const int64_t begin = outputs.offsets[k];
    gradients.value.narrow(0, begin, outputs.offsets[k + 1] - begin)
        .fill_(scope == train::LossScope::kSample ? slope[k] : 2.0 * total * slope[k]);
  }
  return gradients;
}

// `ids` are the samples' own numbers, their places in the batch if empty.
inline Outcome run(models::CausalLM& model,
                   const trie::Plan& plan,
                   train::LossScope scope = train::LossScope::kSample,
                   const std::vector<int32_t>& ids = {},
                   const train::ContextGroup& context = {}) {
  Outcome outcome;
  model.params().ensure_grads();
  model.params().zero_grads();
  outcome.stats = train::walk(
      model,
      plan,
      kHead,
      scope,
      [&](const std::vector<int32_t>& samples, const train::TokenOutputs& outputs) {
        ++outcome.num_calls;
        for (size_t k = 0; k < samples.size(); ++k) {
          const int64_t begin = outputs.offsets[k];
          const int64_t length = outputs.offsets[k + 1] - begin;
          EXPECT_EQ(outcome.value.count(samples[k]), 0u) << "a sample comes once";
          outcome.value[samples[k]] = outputs.value.narrow(0, begin, length).clone();
          if (!outputs.entropy.defined()) continue;
          outcome.entropy[samples[k]] = outputs.entropy.narrow(0, begin, length).clone();
        }
        std::vector<int32_t> numbers = samples;
        for (int32_t& number : numbers) number = ids.empty() ? number : ids[number];
        return loss_of(numbers, outputs, scope, outcome.loss);
      },
      /*observer=*/nullptr,
      /*routers=*/{},
      context);
  for (const Param& param : model.params().params()) {
    outcome.gradients[param.name] = param.grad.clone();
  }
  return outcome;
}

inline trie::Plan dense_plan(const std::vector<Sample>& samples) {
  trie::PlanOptions options;
  options.build.share = false;
  return trie::plan(samples, options);
}

// Largest relative L2 distance of a parameter's gradient, beyond the rounding of sums that cancel.
inline double largest_error(const Outcome& got, const Outcome& wanted) {
  double largest = 0.0;
  for (const auto& [name, want] : wanted.gradients) {
    const double norm = want.to(at::kDouble).norm().item<double>();
    const double error = got.gradients.at(name).sub(want).to(at::kDouble).norm().item<double>();
    const double floor = want.scalar_type() == at::kDouble ? 1e-13 : 1e-7;
    if (error > floor) largest = std::max(largest, (error - floor) / norm);
  }
  return largest;
}

}  // namespace banyan::testing
