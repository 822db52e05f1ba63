#include "banyan/train/update.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <cmath>

#include "banyan/algo/advantage.h"

namespace banyan::train {
namespace {

// The per-token tensors of some samples of the mini-batch, one after the other.
algo::LossTokens loss_tokens(const Batch& batch,
                             const std::vector<int64_t>& mini_batch,
                             const std::vector<int32_t>& samples,
                             const TokenOutputs& outputs) {
  algo::LossTokens tokens;
  tokens.log_prob = outputs.value;
  tokens.entropy = outputs.entropy;
  tokens.offsets = outputs.offsets;
  std::vector<at::Tensor> advantage, old_log_prob, ref_log_prob;
  for (const int32_t s : samples) {
    const int64_t i = mini_batch[s];
    advantage.push_back(batch.advantage[i]);
    if (!batch.old_log_prob.empty()) old_log_prob.push_back(batch.old_log_prob[i]);
    if (!batch.ref_log_prob.empty()) ref_log_prob.push_back(batch.ref_log_prob[i]);
  }
  tokens.advantage = at::cat(advantage).to(tokens.log_prob);
  tokens.mask = at::ones_like(tokens.log_prob);
  if (!old_log_prob.empty()) tokens.old_log_prob = at::cat(old_log_prob).to(tokens.log_prob);
  if (!ref_log_prob.empty()) tokens.ref_log_prob = at::cat(ref_log_prob).to(tokens.log_prob);
  return tokens;
}

algo::LossScale loss_scale(const Config& config,
                           const Batch& batch,
                           const std::vector<int64_t>& mini_batch) {
  algo::LossScale scale;
  for (const int64_t i : mini_batch) {
    const int64_t num_tokens = batch.num_tokens(i);
    scale.num_tokens += static_cast<double>(num_tokens);
    scale.num_sequences += num_tokens > 0 ? 1.0 : 0.0;  // T9
  }
  scale.sequence_norm = config.actor.loss_scale_factor.value_or(
      static_cast<double>(config.rollout.response_length));  // T10
  return scale;
}

void add(const algo::LossMetrics& from, algo::LossMetrics& to) {
  to.loss += from.loss;
  to.pg_loss += from.pg_loss;
  to.kl_loss += from.kl_loss;
  to.entropy_loss += from.entropy_loss;
  to.clipped_tokens += from.clipped_tokens;
  to.clipped_lower_tokens += from.clipped_lower_tokens;
  to.neg_log_ratio_sum += from.neg_log_ratio_sum;
  to.entropy_sum += from.entropy_sum;
  to.max_abs_ratio_minus_one = std::max(to.max_abs_ratio_minus_one, from.max_abs_ratio_minus_one);
}

// What must see the whole mini-batch in one call does (specification A12 rule 5).
LossScope loss_scope(const algo::LossOptions& options) {
  return algo::policy_loss(options.loss_mode).scope == algo::PolicyScope::kMiniBatch
             ? LossScope::kMiniBatch
             : LossScope::kSample;
}

}  // namespace

algo::LossOptions loss_options(const Config& config) {
  const ActorConfig& actor = config.actor;
  algo::LossOptions options;
  options.loss_mode = actor.policy_loss.loss_mode;
  options.loss_agg_mode = actor.loss_agg_mode.value_or("token-mean");
  options.clip_ratio_low = actor.clip_ratio_low.value_or(actor.clip_ratio);  // T1
  options.clip_ratio_high = actor.clip_ratio_high.value_or(actor.clip_ratio);
  options.clip_ratio_c = actor.clip_ratio_c;
  options.entropy_coeff = actor.entropy_coeff;
  options.use_kl_loss = actor.use_kl_loss;
  options.kl_loss_coef = actor.kl_loss_coef;
  options.kl_loss_type = actor.kl_loss_type;
  return options;
}

void check_update_config(const Config& config) {
  algo::check_loss_options(loss_options(config));
  algo::check_advantage_options(config.algorithm.adv_estimator, {}, config.rollout.train.n);
}

UpdateResult accumulate_gradients(const Config& config,
                                  const Batch& batch,
                                  const std::vector<int64_t>& mini_batch,
                                  models::CausalLM& model) {
  const algo::LossOptions options = loss_options(config);
  const algo::LossScale scale = loss_scale(config, batch, mini_batch);
  const trie::Plan plan = trie::plan(samples_of(batch, mini_batch), plan_options(config));

  UpdateResult result;
  result.num_tokens = scale.num_tokens;
  result.num_sequences = scale.num_sequences;
  result.logical_tokens = plan.num_logical;
  result.unique_tokens = plan.num_unique;
  result.computed_tokens = plan.num_computed;
  result.num_blocks = static_cast<int64_t>(plan.blocks.size());
  result.warnings = plan.warnings;
  result.log_prob.resize(mini_batch.size());

  model.params().ensure_grads();
  model.params().zero_grads();
  const HeadSpec head{.temperature = config.rollout.train.temperature, .with_entropy = true};
  const LossFunction loss = [&](const std::vector<int32_t>& samples, const TokenOutputs& outputs) {
    const algo::LossTokens tokens = loss_tokens(batch, mini_batch, samples, outputs);
    const algo::LossResult part = algo::actor_loss(tokens, scale, options);
    add(part.metrics, result.loss);
    for (size_t k = 0; k < samples.size(); ++k) {
      const int64_t begin = tokens.offsets[k];
      result.log_prob[samples[k]] =
          tokens.log_prob.narrow(0, begin, tokens.offsets[k + 1] - begin).clone();
    }
    return TokenGradients{part.grad_log_prob, part.grad_entropy};
  };
  result.walk = walk(model, plan, head, loss_scope(options), loss);
  return result;
}

UpdateResult update(const Config& config,
                    const Batch& batch,
                    const std::vector<int64_t>& mini_batch,
                    double lr,
                    models::CausalLM& model,
                    optim::AdamW& optimizer) {
  UpdateResult result = accumulate_gradients(config, batch, mini_batch, model);
  result.grad_norm = optim::grad_norm(model.params());
  if (!std::isfinite(result.grad_norm) || !std::isfinite(result.loss.loss)) {
    result.skipped = true;
    return result;
  }
  const double clip = config.actor.optim.clip_grad;
  const double scale = clip > 0.0 ? std::min(1.0, clip / (result.grad_norm + 1e-6)) : 1.0;
  optimizer.step(lr, scale);
  model.params().repack();
  return result;
}

}  // namespace banyan::train
