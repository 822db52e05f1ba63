#include "banyan/train/rollout_stage.h"

#include "banyan/train/clock.h"

namespace banyan::train {

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

RolloutResult run_rollout(const Config& config,
                          const std::vector<PromptRow>& rows,
                          int64_t step,
                          bool validation,
                          rollout::Engine& engine,
                          Host& host) {
  const SamplingConfig& sampling = validation ? config.rollout.validation : config.rollout.train;
  rollout::SamplingParams params;
  params.temperature = sampling.do_sample ? sampling.temperature : 0.0;
  params.top_p = sampling.top_p;
  params.top_k = static_cast<int32_t>(sampling.top_k);
  params.max_tokens = static_cast<int32_t>(config.rollout.response_length);
  params.stop_ids = config.stop_ids;
  params.ignore_eos = config.rollout.ignore_eos;
  // Validation noise does not depend on the step, so that two validations differ by the weights
  // alone.
  params.seed = validation ? config.rollout.seed + 1 : config.rollout.seed;
  params.step = validation ? 0 : static_cast<uint64_t>(step);

  std::vector<rollout::Prompt> prompts;
  for (const PromptRow& row : rows) {
    prompts.push_back({row.row, row.tokens, static_cast<int32_t>(sampling.n)});
  }
  RolloutResult result;
  Clock clock;
  result.stats = engine.generate(prompts, params, [&](Trajectory&& trajectory) {
    host.submit(trajectory, validation);
    result.trajectories.push_back(std::move(trajectory));
  });
  result.generate_seconds = clock.lap();
  result.scores = host.poll();
  result.wait_seconds = clock.lap();
  return result;
}

}  // namespace banyan::train
