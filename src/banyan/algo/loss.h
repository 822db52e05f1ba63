// The actor loss on the scored tokens of one block (algorithms spec sections 5, 8, 9). Everything
// is a 1-D tensor over logical response tokens; autograd runs through these small tensors only.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/registry.h"

namespace banyan::algo {

// Per logical token [U], fp32 or fp64, samples one after the other.
struct LossTokens {
  at::Tensor log_prob;      // current policy
  at::Tensor entropy;       // of the row that predicts the token; undefined when not needed
  at::Tensor old_log_prob;  // undefined: log_prob detached (on-policy, T31)
  at::Tensor ref_log_prob;  // undefined when use_kl_loss is off
  at::Tensor advantage;
  at::Tensor mask;               // 1 = counts
  std::vector<int64_t> offsets;  // [S + 1] tokens of sample s: [offsets[s], offsets[s+1])
};

// Denominators of the whole mini-batch over all ranks (T8, T9).
struct LossScale {
  double num_tokens = 0.0;     // N: masked tokens
  double num_sequences = 0.0;  // B: sequences with n_i > 0
  double sequence_norm = 0.0;  // divisor of seq-mean-token-sum-norm
};

struct LossOptions {
  std::string loss_mode = "vanilla";
  std::string loss_agg_mode = "token-mean";
  double clip_ratio_low = 0.2;
  double clip_ratio_high = 0.2;
  double clip_ratio_c = 3.0;
  double entropy_coeff = 0.0;
  bool use_kl_loss = false;
  double kl_loss_coef = 0.001;
  std::string kl_loss_type = "low_var_kl";
};

// Exact sums over the block; the trainer divides by N once all blocks are in (T16).
struct LossMetrics {
  double loss = 0.0;  // this block's share of the actor loss
  double pg_loss = 0.0;
  double kl_loss = 0.0;
  double entropy_loss = 0.0;
  double clipped_tokens = 0.0;
  double clipped_lower_tokens = 0.0;
  double neg_log_ratio_sum = 0.0;  // sum over masked tokens of -(l - l_old)
  double entropy_sum = 0.0;        // likewise of H; 0 without entropies
  double max_abs_ratio_minus_one = 0.0;
};

struct LossResult {
  LossMetrics metrics;
  at::Tensor grad_log_prob;  // [U]
  at::Tensor grad_entropy;   // [U], undefined when entropy_coeff == 0
};

// A policy loss: per-token loss [U] (differentiable in log_prob) and its clip counts.
struct PolicyLossResult {
  at::Tensor loss;
  at::Tensor clipped;        // [U] 0/1
  at::Tensor clipped_lower;  // [U] 0/1
};
using PolicyLoss = PolicyLossResult (*)(const LossTokens&,
                                        const at::Tensor& log_prob,
                                        const LossOptions&);

const Registry<PolicyLoss>& policy_losses();  // "vanilla", ...

// KL estimator per token of (l, l_ref): "kl"/"k1", "abs", "mse"/"k2", "low_var_kl"/"k3".
using KlEstimator = at::Tensor (*)(const at::Tensor& log_prob, const at::Tensor& ref_log_prob);
const Registry<KlEstimator>& kl_estimators();

// Aggregation of a per-token tensor under one of the five modes; already divided by N or B.
at::Tensor aggregate(const at::Tensor& per_token,
                     const LossTokens& tokens,
                     const std::string& mode,
                     const LossScale& scale);

// actor loss = agg(policy) - entropy_coeff agg(H) + kl_loss_coef agg(KL); gradients by autograd.
LossResult actor_loss(const LossTokens& tokens, const LossScale& scale, const LossOptions& options);

// Throws [actor.policy_loss] etc. for an unknown name or a value out of range; call before a model
// loads.
void check_loss_options(const LossOptions& options);

}  // namespace banyan::algo
