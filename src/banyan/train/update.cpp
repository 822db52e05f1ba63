#include "banyan/train/update.h"

#include <ATen/ops/cat.h>

#include <algorithm>

#include "banyan/core/profile.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/correction.h"
#include "banyan/train/sharing_observer.h"
#include "banyan/train/verify.h"

namespace banyan::train {
namespace {

// Weight and mask of the samples of one mini-batch.
struct SampleWeights {
  TokenLists weight;  // per sample; empty: 1
  TokenLists mask;    // per sample
  algo::LossScale scale;
  algo::MetricMap metrics;
};

SampleWeights stored_weights(const Batch& batch, const std::vector<int64_t>& samples) {
  SampleWeights out;
  for (const int64_t i : samples) {
    if (!batch.weight.empty()) out.weight.push_back(batch.weight[i]);
    out.mask.push_back(loss_mask(batch, batch.keep, i));
  }
  return out;
}

// Bypass mode: from a pass without gradients over the whole mini-batch (T35).
SampleWeights bypass_weights(const Batch& batch,
                             const std::vector<int64_t>& samples,
                             const algo::CorrectionOptions& options,
                             const SampleScores& scores) {
  algo::PerToken log_prob;
  for (const at::Tensor& values : scores.value) {
    const at::Tensor wide = values.to(at::kDouble).contiguous();
    const double* begin = wide.const_data_ptr<double>();
    log_prob.emplace_back(begin, begin + wide.numel());
  }
  Correction correction = correct(batch, samples, log_prob, options);
  SampleWeights out;
  out.weight = std::move(correction.weight);
  out.metrics = std::move(correction.metrics);
  for (size_t k = 0; k < samples.size(); ++k) {
    out.mask.push_back(correction.keep.empty() ? loss_mask(batch, {}, samples[k])
                                               : correction.keep[k]);
  }
  return out;
}

SampleWeights sample_weights(const Config& config,
                             const Batch& batch,
                             const std::vector<int64_t>& samples,
                             const Layout& layout,
                             models::CausalLM& model) {
  const CorrectionConfig& correction = config.algorithm.rollout_correction;
  const algo::CorrectionOptions options = correction_options(correction);
  SampleWeights out;
  if (correction.bypass_mode && algo::corrects(options)) {
    const trie::Plan plan = trie::plan(
        samples_of(batch, samples),
        plan_options(config.sharing, layout, block_limits(config.actor), /*for_backward=*/false));
    out = bypass_weights(
        batch,
        samples,
        options,
        score_samples(model, plan, {.temperature = config.rollout.train.temperature}));
  } else {
    out = stored_weights(batch, samples);
  }
  for (const at::Tensor& mask : out.mask) {
    const auto kept = mask.sum().item<double>();
    out.scale.num_tokens += kept;                       // T8
    out.scale.num_sequences += kept > 0.0 ? 1.0 : 0.0;  // T9
  }
  out.scale.sequence_norm = config.actor.loss_scale_factor.value_or(
      static_cast<double>(config.rollout.response_length));  // T10
  return out;
}

// The tensors of some samples of the mini-batch, one after the other.
algo::LossTokens loss_tokens(const Config& config,
                             const Batch& batch,
                             const std::vector<int64_t>& mini_batch,
                             const SampleWeights& weights,
                             const std::vector<int32_t>& samples,
                             const TokenOutputs& outputs) {
  algo::LossTokens tokens;
  tokens.log_prob = outputs.value;
  tokens.entropy = outputs.entropy;
  tokens.offsets = outputs.offsets;
  TokenLists advantage, old_log_prob, ref_log_prob, mask, weight;
  for (const int32_t k : samples) {
    const int64_t i = mini_batch[k];
    const Trajectory& trajectory = batch.trajectories[i];
    advantage.push_back(batch.advantage[i]);
    mask.push_back(weights.mask[k]);
    if (!batch.old_log_prob.empty()) old_log_prob.push_back(batch.old_log_prob[i]);
    if (!batch.ref_log_prob.empty()) ref_log_prob.push_back(batch.ref_log_prob[i]);
    if (!weights.weight.empty()) weight.push_back(weights.weight[k]);
    tokens.sequence.push_back(trajectory.row * config.rollout.train.n + trajectory.index);
  }
  tokens.advantage = at::cat(advantage);
  tokens.mask = at::cat(mask);
  if (!old_log_prob.empty()) tokens.old_log_prob = at::cat(old_log_prob);
  if (!ref_log_prob.empty()) tokens.ref_log_prob = at::cat(ref_log_prob);
  if (!weight.empty()) tokens.weight = at::cat(weight);
  return tokens;
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
  algo::merge(from.extra, to.extra);
}

}  // namespace

algo::LossOptions loss_options(const Config& config) {
  const ActorConfig& actor = config.actor;
  const PolicyLossConfig& loss = actor.policy_loss;
  algo::LossOptions options;
  options.loss_mode = loss.loss_mode;
  options.loss_agg_mode = actor.loss_agg_mode.value_or("");
  options.clip_ratio_low = actor.clip_ratio_low.value_or(actor.clip_ratio);  // T1
  options.clip_ratio_high = actor.clip_ratio_high.value_or(actor.clip_ratio);
  options.clip_ratio_c = actor.clip_ratio_c;
  options.dppo_ratio_cap = loss.dppo_ratio_cap;
  options.tau_pos = actor.tau_pos;
  options.tau_neg = actor.tau_neg;
  options.clip_cov_ratio = loss.clip_cov_ratio;
  options.clip_cov_lb = loss.clip_cov_lb;
  options.clip_cov_ub = loss.clip_cov_ub;
  options.kl_cov_ratio = loss.kl_cov_ratio;
  options.ppo_kl_coef = loss.ppo_kl_coef;
  options.dro_beta = loss.dro_beta.value_or(0.0);
  options.entropy_coeff = actor.entropy_coeff;
  options.use_kl_loss = actor.use_kl_loss;
  options.kl_loss_coef = actor.kl_loss_coef;
  options.kl_loss_type = actor.kl_loss_type;
  options.bypass_mode = config.algorithm.rollout_correction.bypass_mode;
  options.seed = actor.data_loader_seed;
  return options;
}

MiniBatchOptions actor_mini_batches(const Config& config) {
  return {.size = config.actor.ppo_mini_batch_size * config.rollout.train.n,
          .shuffle = config.actor.shuffle,
          .seed = config.actor.data_loader_seed,
          .epochs = config.actor.ppo_epochs};
}

UpdateResult accumulate_gradients(const Config& config,
                                  const Batch& batch,
                                  const MiniBatch& mini_batch,
                                  const Layout& layout,
                                  models::CausalLM& model) {
  const std::vector<int64_t>& samples = mini_batch.samples;
  algo::LossOptions options = loss_options(config);
  options.step = static_cast<uint64_t>(mini_batch.step);
  options.mini_batch = static_cast<uint64_t>(mini_batch.number);
  SampleWeights weights = sample_weights(config, batch, samples, layout, model);
  const std::vector<Sample> paths = samples_of(batch, samples);
  const trie::Plan plan = [&] {
    const profile::Scope timed("plan");
    return trie::plan(
        paths,
        plan_options(config.sharing, layout, block_limits(config.actor), /*for_backward=*/true));
  }();

  UpdateResult result;
  result.num_tokens = weights.scale.num_tokens;
  result.num_sequences = weights.scale.num_sequences;
  result.logical_tokens = plan.num_logical;
  result.unique_tokens = plan.num_unique;
  result.computed_tokens = plan.num_computed;
  result.num_blocks = static_cast<int64_t>(plan.blocks.size());
  result.warnings = plan.warnings;
  result.log_prob.resize(samples.size());
  result.correction = std::move(weights.metrics);

  model.params().ensure_grads();
  model.params().zero_grads();
  const bool whole = algo::policy_loss(options.loss_mode).scope == algo::PolicyScope::kMiniBatch;
  // Entropies of the policy before the step come from the old-log-prob pass where there is one.
  const HeadSpec head{.temperature = config.rollout.train.temperature,
                      .with_entropy = options.entropy_coeff != 0.0 || batch.old_entropy.empty()};
  PassObserver* watching =
      prepare_pass(layout.observer,
                   {.name = "update_actor",
                    .batch_keys = {"input_ids", "position_ids", "response_mask", "advantages"},
                    .share = layout.share,
                    .native = is_native(model.options())},
                   paths,
                   plan);
  result.walk = walk(
      model,
      plan,
      head,
      whole ? LossScope::kMiniBatch : LossScope::kSample,
      [&](const std::vector<int32_t>& which, const TokenOutputs& outputs) {
        const algo::LossResult loss = algo::actor_loss(
            loss_tokens(config, batch, samples, weights, which, outputs), weights.scale, options);
        add(loss.metrics, result.loss);
        for (size_t s = 0; s < which.size(); ++s) {
          const int64_t begin = outputs.offsets[s];
          result.log_prob[which[s]] =
              outputs.value.narrow(0, begin, outputs.offsets[s + 1] - begin).clone();
        }
        return TokenGradients{.value = loss.grad_log_prob, .entropy = loss.grad_entropy};
      },
      watching);
  finish_pass(layout.observer);
  return result;
}

namespace {

UpdateResult verified_gradients(const Config& config,
                                const Batch& batch,
                                const MiniBatch& mini_batch,
                                const Layout& layout,
                                models::CausalLM& model) {
  UpdateResult shared = accumulate_gradients(config, batch, mini_batch, layout, model);
  const std::vector<at::Tensor> gradients = clone_gradients(model.params());
  UpdateResult dense = accumulate_gradients(config, batch, mini_batch, {false, layout.cost}, model);
  const VerifyResult verdict = verify_gradients(
      gradients, shared.loss.loss, dense.loss.loss, model.options().dtype, model.params());
  UpdateResult& used = verdict.passed ? shared : dense;
  used.warnings.push_back(verdict.line());
  used.sharing_failed = !verdict.passed;
  return std::move(used);
}

}  // namespace

UpdateResult update(const Config& config,
                    const Batch& batch,
                    const MiniBatch& mini_batch,
                    const Layout& layout,
                    bool verify,
                    double lr,
                    models::CausalLM& model,
                    optim::AdamW& optimizer) {
  const profile::Scope timed("update");
  UpdateResult result = verify && layout.share
                            ? verified_gradients(config, batch, mini_batch, layout, model)
                            : accumulate_gradients(config, batch, mini_batch, layout, model);
  const AppliedGradients applied =
      apply_gradients(config.actor.optim, lr, result.loss.loss, model, optimizer);
  result.grad_norm = applied.grad_norm;
  result.skipped = applied.skipped;
  return result;
}

}  // namespace banyan::train
