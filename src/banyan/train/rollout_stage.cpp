#include "banyan/train/rollout_stage.h"

#include <iterator>

#include "banyan/train/clock.h"

namespace banyan::train {
namespace {

rollout::SamplingParams sampling_params(const Config& config, RolloutKind kind, int64_t step) {
  const bool validation = kind == RolloutKind::kValidation;
  const SamplingConfig& sampling = validation ? config.rollout.validation : config.rollout.train;
  rollout::SamplingParams params;
  const bool greedy = kind == RolloutKind::kGreedy || !sampling.do_sample;
  params.temperature = greedy ? 0.0 : sampling.temperature;
  params.top_p = sampling.top_p;
  params.top_k = static_cast<int32_t>(sampling.top_k);
  params.max_tokens = static_cast<int32_t>(config.rollout.response_length);
  params.eos_ids = config.stop_ids;
  params.ignore_eos = config.rollout.ignore_eos;
  // Validation noise does not depend on the step, so that two validations differ by the weights
  // alone.
  params.seed = validation ? config.rollout.seed + 1 : config.rollout.seed;
  params.step = validation ? 0 : static_cast<uint64_t>(step);
  return params;
}

int64_t responses_per_prompt(const Config& config, RolloutKind kind) {
  if (kind == RolloutKind::kGreedy) return 1;
  return kind == RolloutKind::kValidation ? config.rollout.validation.n : config.rollout.train.n;
}

template <typename T>
void move_all(std::vector<T>&& from, std::vector<T>& to) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

}  // namespace

rollout::EngineOptions engine_options(const Config& config) {
  rollout::EngineOptions options;
  options.max_num_seqs = static_cast<int32_t>(config.rollout.max_num_seqs);
  options.max_num_batched_tokens = static_cast<int32_t>(config.rollout.max_num_batched_tokens);
  options.memory_share = config.rollout.gpu_memory_utilization;
  options.max_model_len = config.rollout.max_model_len.value_or(config.max_prompt_length +
                                                                config.rollout.response_length);
  options.share_prefix = config.sharing.mode != "off" && config.rollout.enable_prefix_caching;
  options.enable_chunked_prefill = config.rollout.enable_chunked_prefill;
  return options;
}

RolloutResult run_rollout(const Generation& with,
                          const std::vector<PromptRow>& rows,
                          RolloutKind kind,
                          int64_t step) {
  const bool validation = kind == RolloutKind::kValidation;
  const auto n = static_cast<int32_t>(responses_per_prompt(with.config, kind));
  std::vector<rollout::Prompt> prompts;
  for (const PromptRow& row : rows) prompts.push_back({row.row, row.tokens, n});

  RolloutResult result;
  Clock clock;
  result.stats = with.generator.generate(
      prompts,
      sampling_params(with.config, kind, step),
      [&](Trajectory&& trajectory) {
        if (kind == RolloutKind::kGreedy) {
          trajectory.index = static_cast<int32_t>(with.config.rollout.train.n);
        }
        if (with.reward_model == nullptr) with.host.submit(trajectory, validation);
        result.trajectories.push_back(std::move(trajectory));
      },
      /*should_stop=*/nullptr);
  result.generate_seconds = clock.lap();
  if (with.reward_model != nullptr) {
    with.reward_model->score(validation, with.host, result.trajectories);
    for (const Trajectory& trajectory : result.trajectories) {
      with.host.submit(trajectory, validation);
    }
  }
  result.scores = with.host.poll();
  result.wait_seconds = clock.lap();
  return result;
}

void append(RolloutResult from, RolloutResult& to) {
  move_all(std::move(from.trajectories), to.trajectories);
  move_all(std::move(from.scores), to.scores);
  to.stats.logical_prompt_tokens += from.stats.logical_prompt_tokens;
  to.stats.computed_prompt_tokens += from.stats.computed_prompt_tokens;
  to.stats.response_tokens += from.stats.response_tokens;
  to.stats.num_passes += from.stats.num_passes;
  to.stats.num_preemptions += from.stats.num_preemptions;
  to.stats.seconds += from.stats.seconds;
  to.generate_seconds += from.generate_seconds;
  to.wait_seconds += from.wait_seconds;
}

}  // namespace banyan::train
