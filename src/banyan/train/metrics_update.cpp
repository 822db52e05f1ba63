// Figures of the updates. Losses are means over updates, fractions exact sums over all their tokens
// divided by the number of tokens (T16).
#include <ATen/ops/cat.h>

#include <cmath>

#include "banyan/algo/value_loss.h"
#include "banyan/train/detail/metrics.h"

namespace banyan::train::detail {
namespace {

// Entropy of the policy before the step under the loss's aggregation, or 0 without its pass.
double old_entropy(const Config& config, const Batch& batch) {
  algo::LossTokens tokens;
  TokenLists entropy, mask;
  tokens.offsets.push_back(0);
  for (int64_t i = 0; i < batch.size(); ++i) {
    if (!batch.valid(i)) continue;
    entropy.push_back(batch.old_entropy[i].to(at::kDouble));
    mask.push_back(loss_mask(batch, batch.keep, i));
    tokens.offsets.push_back(tokens.offsets.back() + batch.num_tokens(i));
  }
  if (entropy.empty()) return 0.0;
  tokens.mask = at::cat(mask);
  const double norm =
      config.actor.loss_scale_factor.value_or(static_cast<double>(config.rollout.response_length));
  return algo::aggregate(at::cat(entropy),
                         tokens,
                         algo::aggregation_mode(loss_options(config)),
                         algo::loss_scale(tokens, norm))
      .item<double>();
}

void trie_metrics(const Config& config, const StepResult& result, Metrics& metrics) {
  double logical = 0, unique = 0, computed = 0, blocks = 0, recomputed = 0, live = 0, carry = 0;
  for (const UpdateResult& update : result.updates) {
    logical += static_cast<double>(update.logical_tokens);
    unique += static_cast<double>(update.unique_tokens);
    computed += static_cast<double>(update.computed_tokens);
    blocks += static_cast<double>(update.num_blocks);
    recomputed += static_cast<double>(update.walk.num_recomputed);
    live = std::max(live, static_cast<double>(update.walk.peak_live_tokens));
    carry = std::max(carry, static_cast<double>(update.walk.peak_carry_bytes));
  }
  metrics["prefix/share"] = result.share ? 1.0 : 0.0;
  if (unique == 0.0) return;
  const auto epochs = static_cast<double>(config.actor.ppo_epochs);
  metrics["trie/logical_tokens"] = logical / epochs;
  metrics["trie/unique_tokens"] = unique / epochs;
  metrics["trie/computed_tokens"] = computed / epochs;
  metrics["trie/ratio"] = logical / unique;
  metrics["trie/blocks"] = blocks / epochs;
  metrics["trie/recomputed_tokens"] = recomputed / epochs;
  metrics["trie/live_tokens_max"] = live;
  metrics["trie/carry_bytes_max"] = carry;
}

// Of a model with experts; means over updates, the largest load of any.
void router_metrics(const StepResult& result, Metrics& metrics) {
  nn::RouterFigures sum;
  double count = 0;
  for (const UpdateResult& update : result.updates) {
    if (!update.routers) continue;
    count += 1;
    sum.balance += update.routers->balance;
    sum.z += update.routers->z;
    sum.loss += update.routers->loss;
    sum.max_load = std::max(sum.max_load, update.routers->max_load);
  }
  if (count == 0) return;
  metrics["actor/moe_load_balance"] = sum.balance / count;
  metrics["actor/moe_z"] = sum.z / count;
  metrics["actor/moe_load_max"] = sum.max_load;
  metrics["actor/moe_aux_loss"] = sum.loss / count;
}

void actor_metrics(const Config& config, const StepResult& result, Metrics& metrics) {
  algo::LossMetrics sum;
  double tokens = 0, norm = 0, skipped = 0;
  algo::MetricMap correction = result.advantage.correction;
  for (const UpdateResult& update : result.updates) {
    tokens += update.num_tokens;
    norm += update.grad_norm;
    skipped += update.skipped ? 1.0 : 0.0;
    add_metrics(update.loss, sum);
    algo::merge(update.correction, correction);
  }
  for (const auto& [name, metric] : correction) {
    metrics["rollout_corr/" + name] = algo::value_of(metric);
  }
  if (config.algorithm.use_kl_in_reward) {
    metrics["actor/reward_kl_penalty"] = result.advantage.reward_kl.kl;
    metrics["actor/reward_kl_penalty_coeff"] = result.advantage.reward_kl_coef;
  }
  metrics["actor/lr"] = result.lr;
  if (result.updates.empty()) return;  // the critic warms up
  const auto count = static_cast<double>(result.updates.size());
  const double n = std::max(1.0, tokens);
  metrics["actor/loss"] = sum.loss / count;
  metrics["actor/pg_loss"] = sum.pg_loss / count;
  metrics["actor/pg_clipfrac"] = sum.clipped_tokens / n;
  metrics["actor/pg_clipfrac_lower"] = sum.clipped_lower_tokens / n;
  metrics["actor/ppo_kl"] = sum.neg_log_ratio_sum / n;
  metrics["actor/grad_norm"] = norm / count;
  metrics["actor/skipped_updates"] = skipped;
  metrics["actor/ratio_deviation_max"] = sum.max_abs_ratio_minus_one;
  // Without a pass of its own the entropy is that of the (only) update.
  metrics["actor/entropy"] = result.batch.old_entropy.empty() ? sum.entropy_loss / count
                                                              : old_entropy(config, result.batch);
  if (config.actor.use_kl_loss) {
    metrics["actor/kl_loss"] = sum.kl_loss / count;
    metrics["actor/kl_coef"] = config.actor.kl_loss_coef;
  }
  if (config.actor.entropy_coeff != 0.0) metrics["actor/entropy_loss"] = sum.entropy_loss / count;
  for (const auto& [name, metric] : sum.extra) metrics["actor/" + name] = algo::value_of(metric);
  router_metrics(result, metrics);
}

void critic_metrics(const StepResult& result, Metrics& metrics) {
  if (result.critic_updates.empty()) return;
  double loss = 0, clipped = 0, values = 0, tokens = 0, norm = 0, skipped = 0;
  for (const CriticUpdate& update : result.critic_updates) {
    loss += update.loss;
    clipped += update.clipped_tokens;
    values += update.value_sum;
    tokens += update.num_tokens;
    norm += update.grad_norm;
    skipped += update.skipped ? 1.0 : 0.0;
  }
  const auto count = static_cast<double>(result.critic_updates.size());
  const double n = std::max(1.0, tokens);
  metrics["critic/loss"] = metrics["critic/vf_loss"] = loss / count;
  metrics["critic/vf_clipfrac"] = clipped / n;
  metrics["critic/vpred_mean"] = values / n;
  metrics["critic/grad_norm"] = norm / count;
  metrics["critic/skipped_updates"] = skipped;
  metrics["critic/lr"] = result.critic_lr;
  const Batch& batch = result.batch;
  algo::PerToken value = per_token(batch, batch.value), returns = per_token(batch, batch.returns);
  for (int64_t i = batch.size(); i-- > 0;) {
    if (batch.valid(i)) continue;
    value.erase(value.begin() + i);
    returns.erase(returns.begin() + i);
  }
  metrics["critic/vf_explained_var"] = algo::explained_variance(value, returns);
}

// Sums of paired probabilities of trainer (x) and rollout (y).
struct Pairs {
  double count = 0, gap = 0, gap2 = 0, max = 0, x = 0, y = 0, xx = 0, yy = 0, xy = 0;

  void add(double trained, double rolled) {
    const double distance = std::abs(trained - rolled);
    count += 1.0;
    gap += distance;
    gap2 += distance * distance;
    max = std::max(max, distance);
    x += trained;
    y += rolled;
    xx += trained * trained;
    yy += rolled * rolled;
    xy += trained * rolled;
  }
  double correlation() const {
    const double spread =
        std::sqrt(std::max(0.0, xx - x * x / count)) * std::sqrt(std::max(0.0, yy - y * y / count));
    return spread > 0.0 ? (xy - x * y / count) / spread : 1.0;
  }
};

}  // namespace

void update_metrics(const Config& config, const StepResult& result, Metrics& metrics) {
  actor_metrics(config, result, metrics);
  critic_metrics(result, metrics);
  trie_metrics(config, result, metrics);
}

// Rollout and trainer are one set of kernels, so on a CPU in bf16 every difference is exactly 0.
void rollout_gap_metrics(const Config& config, const StepResult& result, Metrics& metrics) {
  Pairs pairs;
  const auto compare = [&](int64_t i, const at::Tensor& log_prob) {
    if (!log_prob.defined()) return;
    const Trajectory& trajectory = result.batch.trajectories[i];
    const std::vector<double> rolled = masked(trajectory, trajectory.rollout_log_probs);
    const at::Tensor wide = log_prob.to(at::kCPU, at::kDouble).contiguous();
    const double* trained = wide.const_data_ptr<double>();
    for (size_t t = 0; t < rolled.size(); ++t) {
      pairs.add(std::exp(trained[t]), std::exp(rolled[t]));
    }
  };
  const Batch& batch = result.batch;
  if (!batch.old_log_prob.empty() && !config.algorithm.rollout_correction.bypass_mode) {
    for (int64_t i = 0; i < batch.size(); ++i) compare(i, batch.old_log_prob[i]);
  } else if (!result.updates.empty()) {
    // The first mini-batch saw the weights that sampled.
    const std::vector<int64_t>& samples = result.mini_batches[0].samples;
    for (size_t k = 0; k < samples.size(); ++k) compare(samples[k], result.updates[0].log_prob[k]);
  }
  metrics["training/rollout_probs_diff_valid"] = pairs.count > 0.0 ? 1.0 : 0.0;
  if (pairs.count == 0.0) return;
  const double mean = pairs.gap / pairs.count;
  metrics["training/rollout_probs_diff_max"] = pairs.max;
  metrics["training/rollout_probs_diff_mean"] = mean;
  metrics["training/rollout_probs_diff_std"] =
      std::sqrt(std::max(0.0, pairs.gap2 / pairs.count - mean * mean));
  metrics["training/rollout_actor_probs_pearson_corr"] = pairs.correlation();
}

}  // namespace banyan::train::detail
