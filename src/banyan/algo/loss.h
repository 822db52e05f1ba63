// The actor loss on scored tokens (algorithms spec sections 5, 8, 9). Everything is a 1-D tensor
// over logical response tokens; autograd runs through these small tensors only.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "banyan/algo/metric.h"
#include "banyan/core/registry.h"

namespace banyan::algo {

// Per logical token [U], fp32 or fp64, samples one after the other.
struct LossTokens {
  at::Tensor log_prob;      // current policy
  at::Tensor entropy;       // of the row that predicts the token; undefined when not needed
  at::Tensor old_log_prob;  // undefined: log_prob detached (on-policy, T31)
  at::Tensor ref_log_prob;  // undefined when use_kl_loss is off
  at::Tensor advantage;
  at::Tensor mask;                // 1 = counts; tokens that rejection took out have 0
  at::Tensor weight;              // rollout correction w >= 0; undefined = 1
  std::vector<int64_t> offsets;   // [S + 1] tokens of sample s: [offsets[s], offsets[s+1])
  std::vector<int64_t> sequence;  // [S] a number of the sequence that no reordering changes (row
                                  // and index): keys of random choices. Empty: 0, 1, 2, ...
};

// Denominators of the whole mini-batch over all ranks (T8, T9).
struct LossScale {
  double num_tokens = 0.0;     // N: masked tokens
  double num_sequences = 0.0;  // B: sequences with n_i > 0
  double sequence_norm = 0.0;  // divisor of seq-mean-token-sum-norm
};

// N and B of these tokens, which must be the whole mini-batch.
LossScale loss_scale(const LossTokens& tokens, double sequence_norm);

struct LossOptions {                  // key below actor_rollout_ref.actor
  std::string loss_mode = "vanilla";  // policy_loss.loss_mode
  std::string loss_agg_mode = "";     // empty: the mode's own, otherwise token-mean
  double clip_ratio_low = 0.2;
  double clip_ratio_high = 0.2;
  double clip_ratio_c = 3.0;     // dual clip of vanilla, > 1
  double dppo_ratio_cap = 20.0;  // policy_loss.dppo_ratio_cap (T2)
  double tau_pos = 1.0;          // sapo
  double tau_neg = 1.05;
  double clip_cov_ratio = 0.0002;  // policy_loss.*
  double clip_cov_lb = 1.0;
  double clip_cov_ub = 5.0;
  double kl_cov_ratio = 0.0002;
  double ppo_kl_coef = 0.1;
  double dro_beta = 0.0;  // dro wants > 0
  double entropy_coeff = 0.0;
  bool use_kl_loss = false;
  double kl_loss_coef = 0.001;
  std::string kl_loss_type = "low_var_kl";
  // algorithm.rollout_correction.bypass_mode: l_old is the rollout's, so a loss with a ratio
  // already holds the correction and takes no `weight` (T35).
  bool bypass_mode = false;
  // Key of the random choice of clip_cov (T17).
  uint64_t seed = 0;
  uint64_t step = 0;
  uint64_t mini_batch = 0;
};

// Exact sums over the tokens; the trainer divides by N once all blocks are in (T16).
struct LossMetrics {
  double loss = 0.0;  // these tokens' share of the actor loss
  double pg_loss = 0.0;
  double kl_loss = 0.0;
  double entropy_loss = 0.0;
  double clipped_tokens = 0.0;        // of pg_clipfrac
  double clipped_lower_tokens = 0.0;  // of pg_clipfrac_lower
  double neg_log_ratio_sum = 0.0;     // sum over masked tokens of -(l - l_old) (T36)
  double entropy_sum = 0.0;           // likewise of H; 0 without entropies
  double max_abs_ratio_minus_one = 0.0;
  MetricMap extra;  // further metrics "actor/<name>": ppo_kl_abs of kl_cov, those of a user's loss
};

struct LossResult {
  LossMetrics metrics;
  at::Tensor grad_log_prob;  // [U]
  at::Tensor grad_entropy;   // [U], undefined when entropy_coeff == 0
};

// A policy loss: per-token loss [U] (differentiable in log_prob), without w, and its clip counts.
struct PolicyLossResult {
  at::Tensor loss;
  at::Tensor clipped;        // [U] 0/1; undefined: none
  at::Tensor clipped_lower;  // [U] 0/1; undefined: none
  MetricMap metrics;
};
// `tokens` are fp64 on the CPU with every vector defined but `entropy`, `ref_log_prob`, `weight`;
// log_prob [U] requires a gradient and equals tokens.log_prob.
using PolicyLossFunction = std::function<PolicyLossResult(
    const LossTokens& tokens, const at::Tensor& log_prob, const LossOptions& options)>;

// kSequence: tokens of one sequence at a time suffice, so any cut into whole sequences gives the
// same loss. kMiniBatch: the function must see all tokens of the mini-batch in one call.
enum class PolicyScope : uint8_t { kSequence, kMiniBatch };

struct PolicyLoss {
  PolicyLossFunction function;
  PolicyScope scope = PolicyScope::kSequence;
  std::string forced_aggregation = "";  // the only loss_agg_mode that fits (T11, T12); empty: any
  bool has_ratio = true;                // uses l - l_old
  bool applies_weight = false;          // multiplies w itself (geo_mean)
  bool is_user = false;                 // a Python function "file.py:name"
};

const Registry<PolicyLoss>& policy_losses();  // "vanilla", "gspo", ...

// The loss that policy_loss.loss_mode names, a user's function included. Throws
// [actor.policy_loss.loss_mode] for an unknown name.
PolicyLoss policy_loss(const std::string& name);

// loss_agg_mode, or what stands in for an empty one.
std::string aggregation_mode(const LossOptions& options);

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
