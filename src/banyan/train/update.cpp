#include "banyan/train/update.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "banyan/algo/advantage.h"
#include "banyan/core/error.h"
#include "banyan/train/block_pass.h"

namespace banyan::train {
namespace {

// The per-token tensors of one block, its samples one after the other.
algo::LossTokens loss_tokens(const Batch& batch,
                             const trie::Block& block,
                             const BlockTokens& logical,
                             const std::vector<int64_t>& mini_batch,
                             const BlockForward& forward) {
  algo::LossTokens tokens;
  tokens.log_prob = logical_log_prob(forward, logical);
  tokens.entropy = logical_entropy(forward, logical);
  std::vector<at::Tensor> advantage, old_log_prob, ref_log_prob;
  for (size_t s = 0; s < block.samples.size(); ++s) {
    const int64_t i = mini_batch[block.samples[s]];
    advantage.push_back(batch.advantage[i]);
    if (!batch.old_log_prob.empty()) old_log_prob.push_back(batch.old_log_prob[i]);
    if (!batch.ref_log_prob.empty()) ref_log_prob.push_back(batch.ref_log_prob[i]);
  }
  tokens.offsets = logical.offsets;
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

// A block between its forward and its backward.
struct InFlight {
  BlockTokens logical;
  BlockForward forward;
  algo::LossResult loss;
};

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
  const double temperature = config.rollout.train.temperature;
  const algo::LossOptions options = loss_options(config);
  const algo::LossScale scale = loss_scale(config, batch, mini_batch);
  const trie::Plan plan = trie::plan(samples_of(batch, mini_batch), plan_options(config));

  UpdateResult result;
  result.num_tokens = scale.num_tokens;
  result.num_sequences = scale.num_sequences;
  result.logical_tokens = plan.num_logical;
  result.unique_tokens = plan.num_unique;
  result.computed_tokens = plan.num_computed;
  result.warnings = plan.warnings;
  result.log_prob.resize(mini_batch.size());

  model.params().ensure_grads();
  model.params().zero_grads();
  std::map<int32_t, InFlight> in_flight;
  for (const trie::Entry& entry : plan.entries) {
    const trie::Block& block = plan.blocks[entry.block];
    InFlight& state = in_flight[entry.block];
    switch (entry.action) {
      case trie::Action::kForward:
        state.logical = block_tokens(plan, block);
        state.forward =
            forward_block(model, block, temperature, /*with_entropy=*/true, /*keep=*/true);
        break;
      case trie::Action::kLoss: {
        const algo::LossTokens tokens =
            loss_tokens(batch, block, state.logical, mini_batch, state.forward);
        state.loss = algo::actor_loss(tokens, scale, options);
        add(state.loss.metrics, result.loss);
        for (size_t s = 0; s < block.samples.size(); ++s) {
          const int64_t begin = tokens.offsets[s];
          result.log_prob[block.samples[s]] =
              tokens.log_prob.narrow(0, begin, tokens.offsets[s + 1] - begin).clone();
        }
        break;
      }
      case trie::Action::kRecompute:  // plans of this pass have no open blocks
        BANYAN_ASSERT(false, "update: a block to recompute");
        break;
      case trie::Action::kBackward:
        backward_block(model,
                       block,
                       state.logical,
                       std::move(state.forward),
                       state.loss.grad_log_prob,
                       state.loss.grad_entropy,
                       temperature);
        in_flight.erase(entry.block);
        break;
    }
  }
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
