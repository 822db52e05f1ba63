#include "banyan/train/metrics.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace banyan::train {
namespace {

// Mean, max and min of a stream of values.
class Spread {
 public:
  void add(double value, double weight = 1.0) {
    sum_ += weight * value;
    weight_ += weight;
    max_ = weight_ == weight ? value : std::max(max_, value);
    min_ = weight_ == weight ? value : std::min(min_, value);
  }
  void write(const std::string& name, Metrics& metrics) const {
    if (weight_ == 0.0) return;
    metrics[name + "/mean"] = sum_ / weight_;
    metrics[name + "/max"] = max_;
    metrics[name + "/min"] = min_;
  }

 private:
  double sum_ = 0.0, weight_ = 0.0, max_ = 0.0, min_ = 0.0;
};

void add_tokens(const at::Tensor& values, Spread& spread) {
  const double* value = values.const_data_ptr<double>();
  for (int64_t t = 0; t < values.numel(); ++t) spread.add(value[t]);
}

void data_metrics(const Config& config, const StepResult& result, Metrics& metrics) {
  const Batch& batch = result.batch;
  Spread score, advantage, returns, response_length, prompt_length;
  std::map<std::string, Spread> extra;
  struct Group {
    double low, high;
    int64_t size = 0;  // valid members
  };
  std::map<int64_t, Group> groups;
  double at_limit = 0, prompt_at_limit = 0, aborted = 0, failed = 0, tokens = 0;
  for (int64_t i = 0; i < batch.size(); ++i) {
    const Trajectory& trajectory = batch.trajectories[i];
    const double length = static_cast<double>(trajectory.response.size());
    const double prompt = static_cast<double>(trajectory.prompt.size());
    response_length.add(length);
    prompt_length.add(prompt);
    tokens += length + prompt;
    at_limit += trajectory.finish == FinishReason::kLength ? 1.0 : 0.0;
    prompt_at_limit += prompt >= static_cast<double>(config.max_prompt_length) ? 1.0 : 0.0;
    aborted += length == 0.0 ? 1.0 : 0.0;
    failed += batch.scores[i].failed ? 1.0 : 0.0;
    if (!batch.valid(i)) continue;
    const double value = batch.scores[i].value;
    score.add(value);
    for (const auto& [name, entry] : batch.scores[i].extra) extra[name].add(entry);
    add_tokens(batch.advantage[i], advantage);
    add_tokens(batch.returns[i], returns);
    Group& group = groups.try_emplace(trajectory.row, Group{value, value}).first->second;
    group = {std::min(group.low, value), std::max(group.high, value), group.size + 1};
  }
  score.write("critic/score", metrics);
  score.write("critic/rewards", metrics);
  advantage.write("critic/advantages", metrics);
  returns.write("critic/returns", metrics);
  response_length.write("response_length", metrics);
  prompt_length.write("prompt_length", metrics);
  for (const auto& [name, spread] : extra) spread.write("reward/" + name, metrics);
  const double size = std::max<double>(1.0, static_cast<double>(batch.size()));
  metrics["response_length/clip_ratio"] = at_limit / size;
  metrics["prompt_length/clip_ratio"] = prompt_at_limit / size;
  metrics["response/aborted_ratio"] = aborted / size;
  metrics["reward/failed"] = failed;
  double flat = 0, single = 0;
  for (const auto& [row, group] : groups) {
    flat += group.low == group.high ? 1.0 : 0.0;
    single += group.size == 1 ? 1.0 : 0.0;
  }
  metrics["training/flat_group_ratio"] =
      groups.empty() ? 0.0 : flat / static_cast<double>(groups.size());
  metrics["training/single_groups"] = single;  // T20
  metrics["perf/total_num_tokens"] = tokens;
}

void actor_metrics(const Config& config, const StepResult& result, Metrics& metrics) {
  double tokens = 0, clipped = 0, clipped_lower = 0, kl = 0, entropy = 0, skipped = 0, ratio = 0;
  double loss = 0, pg = 0, kl_loss = 0, entropy_loss = 0, norm = 0;
  double logical = 0, unique = 0, computed = 0;
  for (const UpdateResult& update : result.updates) {
    tokens += update.num_tokens;
    clipped += update.loss.clipped_tokens;
    clipped_lower += update.loss.clipped_lower_tokens;
    kl += update.loss.neg_log_ratio_sum;
    entropy += update.loss.entropy_sum;
    loss += update.loss.loss;
    pg += update.loss.pg_loss;
    kl_loss += update.loss.kl_loss;
    entropy_loss += update.loss.entropy_loss;
    norm += update.grad_norm;
    skipped += update.skipped ? 1.0 : 0.0;
    ratio = std::max(ratio, update.loss.max_abs_ratio_minus_one);
    logical += static_cast<double>(update.logical_tokens);
    unique += static_cast<double>(update.unique_tokens);
    computed += static_cast<double>(update.computed_tokens);
  }
  const double count = std::max<double>(1.0, static_cast<double>(result.updates.size()));
  const double n = std::max(1.0, tokens);
  metrics["actor/loss"] = loss / count;
  metrics["actor/pg_loss"] = pg / count;
  metrics["actor/pg_clipfrac"] = clipped / n;
  metrics["actor/pg_clipfrac_lower"] = clipped_lower / n;
  metrics["actor/ppo_kl"] = kl / n;
  metrics["actor/entropy"] = entropy / n;
  metrics["actor/grad_norm"] = norm / count;
  metrics["actor/lr"] = result.lr;
  metrics["actor/skipped_updates"] = skipped;
  metrics["actor/ratio_deviation_max"] = ratio;
  if (config.actor.use_kl_loss) {
    metrics["actor/kl_loss"] = kl_loss / count;
    metrics["actor/kl_coef"] = config.actor.kl_loss_coef;
  }
  if (config.actor.entropy_coeff != 0.0) metrics["actor/entropy_loss"] = entropy_loss / count;
  if (unique > 0.0) {
    metrics["trie/logical_tokens"] = logical / static_cast<double>(config.actor.ppo_epochs);
    metrics["trie/unique_tokens"] = unique / static_cast<double>(config.actor.ppo_epochs);
    metrics["trie/computed_tokens"] = computed / static_cast<double>(config.actor.ppo_epochs);
    metrics["trie/ratio"] = logical / unique;
  }
}

// |exp(l_old) - exp(l_rollout)| over masked tokens: rollout and trainer are one set of kernels, so
// on a CPU in bf16 every figure here is exactly 0.
void rollout_gap_metrics(const StepResult& result,
                         const std::vector<std::vector<int64_t>>& first_epoch,
                         Metrics& metrics) {
  double sum = 0, squares = 0, max = 0, count = 0;
  const auto compare = [&](int64_t i, const at::Tensor& log_prob) {
    if (!log_prob.defined()) return;
    const at::Tensor cpu = log_prob.to(at::kCPU, at::kDouble).contiguous();
    const double* trained = cpu.const_data_ptr<double>();
    const Trajectory& trajectory = result.batch.trajectories[i];
    int64_t next = 0;
    for (size_t t = 0; t < trajectory.response.size(); ++t) {
      if (trajectory.response_mask[t] == 0) continue;
      const double gap =
          std::abs(std::exp(trained[next++]) - std::exp(double{trajectory.rollout_log_probs[t]}));
      sum += gap;
      squares += gap * gap;
      max = std::max(max, gap);
      count += 1.0;
    }
  };
  if (!result.batch.old_log_prob.empty()) {
    for (int64_t i = 0; i < result.batch.size(); ++i) compare(i, result.batch.old_log_prob[i]);
  } else if (!first_epoch.empty() && !result.updates.empty()) {
    for (size_t k = 0; k < first_epoch[0].size(); ++k) {
      compare(first_epoch[0][k], result.updates[0].log_prob[k]);
    }
  }
  metrics["training/rollout_probs_diff_valid"] = count > 0.0 ? 1.0 : 0.0;
  if (count == 0.0) return;
  metrics["training/rollout_probs_diff_max"] = max;
  metrics["training/rollout_probs_diff_mean"] = sum / count;
  metrics["training/rollout_probs_diff_std"] =
      std::sqrt(std::max(0.0, squares / count - (sum / count) * (sum / count)));
}

void timing_metrics(const StepResult& result, Metrics& metrics) {
  const StageSeconds& seconds = result.seconds;
  metrics["timing_s/gen"] = seconds.gen;
  metrics["timing_s/reward"] = seconds.reward;
  metrics["timing_s/old_log_prob"] = seconds.old_log_prob;
  metrics["timing_s/ref"] = seconds.ref;
  metrics["timing_s/adv"] = seconds.adv;
  metrics["timing_s/update_actor"] = seconds.update_actor;
  metrics["timing_s/step"] = seconds.step;
  const double tokens = metrics["perf/total_num_tokens"];
  const double response =
      std::max<double>(1.0, static_cast<double>(result.rollout.stats.response_tokens));
  metrics["timing_per_token_ms/gen"] = 1e3 * seconds.gen / response;
  metrics["timing_per_token_ms/update_actor"] = 1e3 * seconds.update_actor / std::max(1.0, tokens);
  metrics["perf/time_per_step"] = seconds.step;
  metrics["perf/throughput"] = tokens / std::max(1e-9, seconds.step);
  metrics["perf/state_bytes"] = static_cast<double>(result.state_bytes);
  metrics["perf/update_peak_bytes"] = static_cast<double>(result.update_peak_bytes);
  metrics["rollout/logical_prompt_tokens"] =
      static_cast<double>(result.rollout.stats.logical_prompt_tokens);
  metrics["rollout/computed_prompt_tokens"] =
      static_cast<double>(result.rollout.stats.computed_prompt_tokens);
  metrics["rollout/response_tokens"] = static_cast<double>(result.rollout.stats.response_tokens);
  metrics["rollout/preemptions"] = static_cast<double>(result.rollout.stats.num_preemptions);
}

}  // namespace

Metrics step_metrics(const Config& config, const StepResult& result, int64_t step) {
  Metrics metrics;
  data_metrics(config, result, metrics);
  actor_metrics(config, result, metrics);
  rollout_gap_metrics(result, mini_batches(config, result.batch, step, 0), metrics);
  timing_metrics(result, metrics);
  metrics["training/global_step"] = static_cast<double>(step);
  // The loader drops the last incomplete batch of an epoch.
  const int64_t steps_per_epoch =
      std::max<int64_t>(1, config.num_train_rows / config.train_batch_size);
  metrics["training/epoch"] = static_cast<double>((step - 1) / steps_per_epoch);
  return metrics;
}

}  // namespace banyan::train
