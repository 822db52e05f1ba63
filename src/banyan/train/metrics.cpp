#include "banyan/train/metrics.h"

#include <algorithm>

#include "banyan/core/memory.h"
#include "banyan/train/detail/metrics.h"
#include "banyan/train/trainer_mode.h"

namespace banyan::train {
namespace {

constexpr double kGigabyte = 1024.0 * 1024.0 * 1024.0;

void timing_metrics(const Config& config, const StepResult& result, Metrics& metrics) {
  const StageSeconds& seconds = result.seconds;
  const bool has_critic = !result.critic_updates.empty();
  metrics["timing_s/gen"] = seconds.gen;
  metrics["timing_s/reward"] = seconds.reward;
  if (num_rollout_ranks(config) > 0) {
    metrics["timing_s/rollout_idle"] = seconds.rollout_idle;
    metrics["timing_s/wait_for_rollout"] = seconds.wait_for_rollout;
  }
  metrics["timing_s/old_log_prob"] = seconds.old_log_prob;
  metrics["timing_s/ref"] = seconds.ref;
  metrics["timing_s/adv"] = seconds.adv;
  metrics["timing_s/update_actor"] = seconds.update_actor;
  metrics["timing_s/step"] = seconds.step;
  const double tokens = std::max(1.0, metrics["perf/total_num_tokens"]);
  const double response = std::max(1.0, static_cast<double>(result.rollout.stats.response_tokens));
  metrics["timing_per_token_ms/gen"] = 1e3 * seconds.gen / response;
  metrics["timing_per_token_ms/adv"] = 1e3 * seconds.adv / tokens;
  metrics["timing_per_token_ms/update_actor"] = 1e3 * seconds.update_actor / tokens;
  if (!result.batch.ref_log_prob.empty()) {
    metrics["timing_per_token_ms/ref"] = 1e3 * seconds.ref / tokens;
  }
  if (has_critic) {
    metrics["timing_s/values"] = seconds.values;
    metrics["timing_s/update_critic"] = seconds.update_critic;
    metrics["timing_per_token_ms/values"] = 1e3 * seconds.values / tokens;
    metrics["timing_per_token_ms/update_critic"] = 1e3 * seconds.update_critic / tokens;
  }
  metrics["perf/time_per_step"] = seconds.step;
  metrics["perf/throughput"] =
      tokens / std::max(1e-9, seconds.step) / static_cast<double>(result.num_processes);
}

void memory_metrics(const StepResult& result, Metrics& metrics) {
  metrics["perf/state_bytes"] = static_cast<double>(result.state_bytes);
  metrics["perf/update_peak_bytes"] = static_cast<double>(result.update_peak_bytes);
  metrics["actor/perf/max_memory_allocated_gb"] =
      static_cast<double>(result.update_peak_bytes) / kGigabyte;
  metrics["actor/perf/cpu_memory_used_gb"] = static_cast<double>(resident_bytes()) / kGigabyte;
}

void rollout_metrics(const rollout::GenerateStats& stats, Metrics& metrics) {
  metrics["rollout/logical_prompt_tokens"] = static_cast<double>(stats.logical_prompt_tokens);
  metrics["rollout/computed_prompt_tokens"] = static_cast<double>(stats.computed_prompt_tokens);
  metrics["rollout/response_tokens"] = static_cast<double>(stats.response_tokens);
  metrics["rollout/preemptions"] = static_cast<double>(stats.num_preemptions);
}

}  // namespace

Metrics step_metrics(const Config& config, const StepResult& result, int64_t step) {
  Metrics metrics;
  detail::data_metrics(config, result, metrics);
  detail::update_metrics(config, result, metrics);
  detail::rollout_gap_metrics(config, result, metrics);
  detail::off_policy_metrics(result.batch, step, metrics);
  timing_metrics(config, result, metrics);
  memory_metrics(result, metrics);
  rollout_metrics(result.rollout.stats, metrics);
  metrics["training/global_step"] = static_cast<double>(step);
  // The loader drops the last incomplete batch of an epoch.
  const int64_t steps_per_epoch =
      std::max<int64_t>(1, config.num_train_rows / config.train_batch_size);
  metrics["training/epoch"] = static_cast<double>((step - 1) / steps_per_epoch);
  return metrics;
}

}  // namespace banyan::train
