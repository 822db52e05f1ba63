#include "banyan/train/loss_inputs.h"

#include <ATen/ops/cat.h>

#include <numeric>

#include "banyan/train/correction.h"
#include "banyan/train/spread.h"

namespace banyan::train {
namespace {

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
                             const TokenLists& scores) {
  algo::PerToken log_prob;
  for (const at::Tensor& values : scores) {
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

// A tensor over places, cut into them.
TokenLists cut(const at::Tensor& values, const std::vector<int64_t>& offsets) {
  TokenLists out;
  for (size_t k = 0; k + 1 < offsets.size() && values.defined(); ++k) {
    out.push_back(values.narrow(0, offsets[k], offsets[k + 1] - offsets[k]));
  }
  return out;
}

at::Tensor joined(const TokenLists& lists, const std::vector<int32_t>& which) {
  TokenLists chosen;
  for (const int32_t k : which) chosen.push_back(lists[k]);
  return at::cat(chosen);
}

}  // namespace

SampleWeights sample_weights(const Config& config,
                             const Batch& batch,
                             const std::vector<int64_t>& samples,
                             const Layout& layout,
                             models::CausalLM& model) {
  const CorrectionConfig& correction = config.algorithm.rollout_correction;
  const algo::CorrectionOptions options = correction_options(correction);
  SampleWeights out;
  if (correction.bypass_mode && algo::corrects(options)) {
    const trie::PlanOptions plan =
        plan_options(config.sharing, layout, block_limits(config.actor), /*for_backward=*/false);
    out = bypass_weights(
        batch,
        samples,
        options,
        score_places(
            batch, samples, model, plan, {.temperature = config.rollout.train.temperature}, layout)
            .value);
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

TokenGradients WholeLoss::gradients(const std::vector<int32_t>& which) const {
  TokenGradients out{.value = joined(grad_log_prob, which), .entropy = {}};
  if (!grad_entropy.empty()) out.entropy = joined(grad_entropy, which);
  return out;
}

WholeLoss whole_loss(const Config& config,
                     const Batch& batch,
                     const std::vector<int64_t>& mini_batch,
                     const SampleWeights& weights,
                     const HeadSpec& head,
                     const algo::LossOptions& options,
                     const Layout& layout,
                     models::CausalLM& model) {
  const trie::PlanOptions plan =
      plan_options(config.sharing, layout, block_limits(config.actor), /*for_backward=*/false);
  const BatchScores scores = score_places(batch, mini_batch, model, plan, head, layout);
  TokenOutputs outputs{at::cat(scores.value), {}, {0}};
  if (!scores.entropy.empty()) outputs.entropy = at::cat(scores.entropy);
  for (const at::Tensor& value : scores.value) {
    outputs.offsets.push_back(outputs.offsets.back() + value.numel());
  }
  std::vector<int32_t> all(mini_batch.size());
  std::iota(all.begin(), all.end(), 0);
  const algo::LossResult loss = algo::actor_loss(
      loss_tokens(config, batch, mini_batch, weights, all, outputs), weights.scale, options);
  return {.metrics = loss.metrics,
          .grad_log_prob = cut(loss.grad_log_prob, outputs.offsets),
          .grad_entropy = cut(loss.grad_entropy, outputs.offsets)};
}

}  // namespace banyan::train
