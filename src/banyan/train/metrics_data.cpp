// Figures of the samples. Means over tokens cover the masked response tokens of valid samples
// (T16).
#include <algorithm>
#include <cmath>
#include <map>

#include "banyan/algo/variance_proxy.h"
#include "banyan/train/detail/metrics.h"

namespace banyan::train::detail {
namespace {

// A trajectory's assistant turns, and with them as many turns of the other side.
double num_turns(const Trajectory& trajectory) {
  double runs = 0.0;
  uint8_t before = 0;
  for (const uint8_t mask : trajectory.response_mask) {
    runs += mask != 0 && before == 0 ? 1.0 : 0.0;
    before = mask;
  }
  return 2.0 * runs;
}

void length_metrics(const Config& config, const Batch& batch, Metrics& metrics) {
  Spread response, answered, prompt, turns;
  double at_limit = 0, prompt_at_limit = 0, aborted = 0, failed = 0, tokens = 0, answered_limit = 0;
  for (int64_t i = 0; i < batch.size(); ++i) {
    const Trajectory& trajectory = batch.trajectories[i];
    const auto length = static_cast<double>(trajectory.response.size());
    const auto before = static_cast<double>(trajectory.prompt.size());
    const bool is_aborted = batch.num_tokens(i) == 0;  // T22
    const double limit = trajectory.finish == FinishReason::kLength ? 1.0 : 0.0;
    response.add(length);
    prompt.add(before);
    turns.add(num_turns(trajectory));
    tokens += length + before;
    at_limit += limit;
    prompt_at_limit += before >= static_cast<double>(config.max_prompt_length) ? 1.0 : 0.0;
    aborted += is_aborted ? 1.0 : 0.0;
    failed += batch.scores[i].failed ? 1.0 : 0.0;
    if (is_aborted) continue;
    answered.add(length);
    answered_limit += limit;
  }
  response.write("response_length", metrics);
  answered.write("response_length_non_aborted", metrics);
  prompt.write("prompt_length", metrics);
  turns.write("training/num_turns", metrics);
  const double size = std::max(1.0, static_cast<double>(batch.size()));
  metrics["response_length/clip_ratio"] = at_limit / size;
  metrics["response_length_non_aborted/clip_ratio"] =
      answered_limit / std::max(1.0, size - aborted);
  metrics["prompt_length/clip_ratio"] = prompt_at_limit / size;
  metrics["response/aborted_ratio"] = aborted / size;
  metrics["reward/failed"] = failed;
  metrics["perf/total_num_tokens"] = tokens;
}

// Tokens of a rank: as the prompts were dealt out for the rollout, and ("balanced") as the updates
// spread the groups by modelled time, a mean over epochs.
void rank_metrics(const Config& config, const StepResult& result, Metrics& metrics) {
  const Batch& batch = result.batch;
  std::vector<double> dealt(result.num_ranks, 0.0), spread(result.num_ranks, 0.0);
  int64_t group = -1, row = -1;
  for (int64_t i = 0; i < batch.size(); ++i) {
    const Trajectory& t = batch.trajectories[i];
    if (group < 0 || t.row != row) ++group;
    row = t.row;
    dealt[group % result.num_ranks] += static_cast<double>(t.prompt.size() + t.response.size());
  }
  double imbalance = 0.0;
  for (const UpdateResult& update : result.updates) {
    imbalance += update.dp_imbalance;
    for (size_t r = 0; r < update.rank_tokens.size(); ++r) {
      spread[r] +=
          static_cast<double>(update.rank_tokens[r]) / static_cast<double>(config.actor.ppo_epochs);
    }
  }
  const bool is_spread = result.num_ranks > 1 && !result.updates.empty();
  const std::vector<double>& balanced = is_spread ? spread : dealt;
  const auto [low, high] = std::minmax_element(dealt.begin(), dealt.end());
  const auto [even_low, even_high] = std::minmax_element(balanced.begin(), balanced.end());
  double sum = 0.0;
  for (const double tokens : dealt) sum += tokens;
  metrics["global_seqlen/min"] = *low;
  metrics["global_seqlen/max"] = *high;
  metrics["global_seqlen/mean"] = sum / static_cast<double>(result.num_ranks);
  metrics["global_seqlen/minmax_diff"] = *high - *low;
  metrics["global_seqlen/balanced_min"] = *even_low;
  metrics["global_seqlen/balanced_max"] = *even_high;
  for (const auto& [what, bytes] : result.sent_bytes) {
    metrics["comm/" + what + "_bytes"] = static_cast<double>(bytes);
  }
  if (is_spread) {
    metrics["trie/dp_imbalance"] = imbalance / static_cast<double>(result.updates.size());
  }
}

void group_metrics(const Batch& batch, Metrics& metrics) {
  struct Group {
    double low, high;
    int64_t size = 0;  // valid members
  };
  std::map<int64_t, Group> groups;
  for (int64_t i = 0; i < batch.size(); ++i) {
    if (!batch.valid(i)) continue;
    const double value = batch.scores[i].value;
    Group& group = groups.try_emplace(batch.trajectories[i].row, Group{value, value}).first->second;
    group = {std::min(group.low, value), std::max(group.high, value), group.size + 1};
  }
  double flat = 0, single = 0;
  for (const auto& [row, group] : groups) {
    flat += group.low == group.high ? 1.0 : 0.0;
    single += group.size == 1 ? 1.0 : 0.0;
  }
  metrics["training/flat_group_ratio"] =
      groups.empty() ? 0.0 : flat / static_cast<double>(groups.size());
  metrics["training/single_groups"] = single;  // T20
}

// Every token of the valid trajectories' lists.
void write_tokens(const std::string& name,
                  const algo::PerToken& values,
                  const Batch& batch,
                  Metrics& metrics) {
  Spread spread;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!batch.valid(static_cast<int64_t>(i))) continue;
    for (const double value : values[i]) spread.add(value);
  }
  spread.write(name, metrics);
}

void reward_metrics(const Batch& batch, Metrics& metrics) {
  Spread score, rewards, baseline;
  std::map<std::string, Spread> extra;
  const algo::PerToken token_reward = per_token(batch, batch.token_reward);
  for (int64_t i = 0; i < batch.size(); ++i) {
    if (!batch.valid(i)) continue;
    score.add(batch.scores[i].value);
    double sum = 0.0;
    for (const double reward : token_reward[i]) sum += reward;
    rewards.add(sum);
    if (!batch.greedy_score.empty()) baseline.add(batch.greedy_score[i]);
    for (const auto& [name, entry] : batch.scores[i].extra) extra[name].add(entry);
  }
  score.write("critic/score", metrics);
  rewards.write("critic/rewards", metrics);
  baseline.write("critic/greedy_score", metrics);
  for (const auto& [name, spread] : extra) spread.write("reward/" + name, metrics);
  write_tokens("critic/advantages", per_token(batch, batch.advantage), batch, metrics);
  write_tokens("critic/returns", per_token(batch, batch.returns), batch, metrics);
  write_tokens("critic/values", per_token(batch, batch.value), batch, metrics);
}

void variance_metrics(const StepResult& result, Metrics& metrics) {
  const Batch& batch = result.batch;
  if (batch.sum_squares.empty() || result.updates.empty()) return;
  algo::PerToken advantage = per_token(batch, batch.advantage);
  for (int64_t i = 0; i < batch.size(); ++i) {
    if (!batch.valid(i)) advantage[i].clear();
  }
  double norm = 0.0;
  for (const UpdateResult& update : result.updates) norm += update.grad_norm;
  norm /= static_cast<double>(result.updates.size());
  const algo::MetricMap proxies = algo::variance_proxy(advantage,
                                                       per_token(batch, batch.old_log_prob),
                                                       per_token(batch, batch.sum_squares),
                                                       per_token(batch, batch.weight),
                                                       norm);
  for (const auto& [name, metric] : proxies) {
    metrics["variance_proxy/" + name] = algo::value_of(metric);
  }
}

}  // namespace

void data_metrics(const Config& config, const StepResult& result, Metrics& metrics) {
  length_metrics(config, result.batch, metrics);
  rank_metrics(config, result, metrics);
  group_metrics(result.batch, metrics);
  reward_metrics(result.batch, metrics);
  variance_metrics(result, metrics);
  if (config.rollout.over_sample_rate > 0.0) {
    metrics["rollout/cut_groups"] = static_cast<double>(result.over_sample.cut_groups);
    metrics["rollout/resumed_responses"] =
        static_cast<double>(result.over_sample.resumed_responses);
    metrics["training/off_policy/evicted_samples"] =
        static_cast<double>(result.over_sample.evicted_samples);
  }
  if (!config.algorithm.filter_groups.enable) return;
  const FilterStats& filter = result.filter;
  metrics["training/filter_groups/num_gen_batches"] = static_cast<double>(filter.num_gen_batches);
  metrics["training/filter_groups/evicted_samples"] = static_cast<double>(filter.evicted_samples);
  metrics["training/rollout_failure/discarded_surplus_samples"] =
      static_cast<double>(filter.surplus_samples);
}

}  // namespace banyan::train::detail
