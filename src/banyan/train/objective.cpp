#include "banyan/train/objective.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/train/detail/objectives.h"
#include "banyan/train/layout.h"

namespace banyan::train {
namespace detail {
namespace {

BatchResult empty_result(const trie::Plan& plan) {
  BatchResult out;
  out.logical_tokens = plan.num_logical;
  out.unique_tokens = plan.num_unique;
  out.computed_tokens = plan.num_computed + plan.num_recomputed;
  out.warnings = plan.warnings;
  return out;
}

}  // namespace

std::vector<Sample> flatten(std::vector<Example> batch) {
  std::vector<Sample> samples;
  for (Example& example : batch) {
    for (Sample& sample : example) {
      sample.uid = static_cast<int64_t>(samples.size());
      samples.push_back(std::move(sample));
    }
  }
  return samples;
}

double num_scored(const std::vector<Sample>& samples) {
  int64_t count = 0;
  for (const Sample& sample : samples) {
    // The first token has nothing that predicts it.
    count += std::count_if(
        sample.scored.begin() + 1, sample.scored.end(), [](uint8_t bit) { return bit != 0; });
  }
  return static_cast<double>(count);
}

BatchResult train_pass(const Pass& pass,
                       const std::vector<Sample>& samples,
                       bool pairs,
                       const Evaluate& evaluate) {
  const trie::Plan plan = plan_of(pass, samples, /*for_backward=*/true);
  BatchResult result = empty_result(plan);
  std::optional<SplitPairs> split;
  if (pairs) {
    split.emplace(pass, plan, samples);
    result.computed_tokens += split->num_computed();
  }
  walk(
      pass.model,
      plan,
      pass.head,
      LossScope::kSample,
      [&](const std::vector<int32_t>& which, const TokenOutputs& outputs) {
        Evaluated evaluated =
            split ? split->evaluate(evaluate, which, outputs) : evaluate(which, outputs);
        result.loss += evaluated.loss;
        algo::merge(evaluated.metrics, result.metrics);
        return std::move(evaluated.gradients);
      },
      /*observer=*/nullptr,
      /*routers=*/{},
      pass.layout.context);
  return result;
}

BatchResult score_pass(const Pass& pass,
                       const std::vector<Sample>& samples,
                       const Evaluate& evaluate) {
  const trie::Plan plan = plan_of(pass, samples, /*for_backward=*/false);
  const SampleScores scores =
      score_samples(pass.model, plan, pass.head, /*observer=*/nullptr, pass.layout.context);
  if (samples.empty()) return empty_result(plan);
  TokenOutputs outputs;
  outputs.value = at::cat(scores.value);
  outputs.offsets.assign(1, 0);
  for (const at::Tensor& value : scores.value) {
    outputs.offsets.push_back(outputs.offsets.back() + value.numel());
  }
  std::vector<int32_t> all(samples.size());
  std::iota(all.begin(), all.end(), 0);
  BatchResult result = empty_result(plan);
  Evaluated evaluated = evaluate(all, outputs);
  result.loss = evaluated.loss;
  result.metrics = std::move(evaluated.metrics);
  return result;
}

std::vector<at::Tensor> log_probs(const Pass& pass, const std::vector<Sample>& samples) {
  const trie::Plan plan = plan_of(pass, samples, /*for_backward=*/false);
  return score_samples(pass.model, plan, pass.head, /*observer=*/nullptr, pass.layout.context)
      .value;
}

Pass pass_of(const FinetuneConfig& config,
             const Layout& layout,
             int64_t samples_per_row,
             models::CausalLM& model) {
  BlockLimits limits{.max_tokens = config.data.max_token_len_per_gpu.value_or(0)};
  if (!config.data.use_dynamic_bsz) {
    limits.max_samples = samples_per_row * config.data.micro_batch_size_per_gpu;
  }
  return {model, config.sharing, config.sharing_margin, layout, limits};
}

trie::Plan plan_of(const Pass& pass, const std::vector<Sample>& samples, bool for_backward) {
  Layout layout = pass.layout;
  layout.share = decide_sharing(pass.sharing, pass.margin, layout.cost, pass.limits, samples);
  const trie::PlanOptions options = plan_options(pass.sharing, layout, pass.limits, for_backward);
  return train::plan_of(samples, options, layout);
}

}  // namespace detail

std::unique_ptr<Objective> make_objective(const FinetuneConfig& config,
                                          const Layout& layout,
                                          models::CausalLM& model,
                                          FinetuneHost& host,
                                          parallel::Groups& groups) {
  const detail::Pass pass = detail::pass_of(config, layout, config.preference ? 2 : 1, model);
  if (!config.preference) return detail::make_sft(pass);
  const std::string& objective = config.preference->objective;
  if (objective == "reward_model") return detail::make_reward_model(config, pass);
  BANYAN_CHECK(objective == "dpo" || objective == "ipo",
               "[config] preference.objective: wanted dpo, ipo or reward_model, got '",
               objective,
               "'");
  return detail::make_preference(config, pass, host, groups);
}

models::LoadOptions finetune_load_options(const FinetuneConfig& config,
                                          std::vector<std::string>* notes) {
  models::LoadOptions options;
  options.compute = compute_options(config.dtype, config.trainer.device, config.kernels);
  options.notes = notes;
  if (config.preference && config.preference->objective == "reward_model") {
    options.head = models::HeadKind::kValue;
    options.head_bias = false;  // cancels in every difference of two rewards
    options.head_seed = config.preference->head_seed;
  }
  return options;
}

}  // namespace banyan::train
