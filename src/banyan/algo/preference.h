// Losses on pairs: a chosen and a rejected answer to one prompt.
//   sigmoid  DPO (Rafailov et al., "Direct preference optimization", 2023), with label smoothing e:
//            -(1 - e) log s(beta h) - e log s(-beta h)
//   ipo      IPO (Azar et al., "A general theoretical paradigm", 2023): (h - 1 / (2 beta))^2
//   h = (l_chosen - l_rejected) - (ref_chosen - ref_rejected), l = sum of the token
//   log-probabilities
// and the Bradley-Terry loss of a reward model: -log s(r_chosen - r_rejected - margin).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/algo/metric.h"

namespace banyan::algo {

struct PreferenceOptions {
  std::string loss_type = "sigmoid";  // sigmoid | ipo
  double beta = 0.1;
  double label_smoothing = 0.0;  // [0, 0.5)
  bool reference_free = false;   // the reference is uniform: ref terms are 0
  double sft_coef = 0.0;  // adds sft_coef * (-mean over the chosen tokens of l) (RPO's rpo_alpha)
};

// All samples of a mini-batch of pairs, one after the other, [U] per masked token.
struct PreferenceTokens {
  at::Tensor log_prob;
  at::Tensor ref_log_prob;       // undefined with reference_free
  std::vector<int64_t> offsets;  // [S + 1]
  std::vector<int64_t> chosen;   // [P] sample of each pair
  std::vector<int64_t> rejected;
};

struct PreferenceResult {
  double loss = 0.0;  // sum over the pairs, divided by `num_pairs`
  at::Tensor grad;    // [U], type and device of log_prob
  MetricMap metrics;  // rewards/{chosen, rejected, accuracies, margins}, logps/{chosen, rejected}
};

// `num_pairs` counts the pairs of the whole mini-batch.
PreferenceResult preference_loss(const PreferenceTokens& tokens,
                                 double num_pairs,
                                 const PreferenceOptions& options);
void check_preference_options(const PreferenceOptions& options);

struct RewardModelOptions {
  double center_rewards_coefficient =
      0.0;  // adds c (r_chosen + r_rejected)^2 (Eisenstein et al., 2023)
};

struct RewardModelResult {
  double loss = 0.0;                      // sum over the pairs, divided by `num_pairs`
  at::Tensor grad_chosen, grad_rejected;  // [P]
  MetricMap metrics;                      // rewards/{chosen, rejected, accuracies, margins}
};

// chosen, rejected [P]: the reward model's numbers; margin [P] may be undefined (0).
RewardModelResult reward_model_loss(const at::Tensor& chosen,
                                    const at::Tensor& rejected,
                                    const at::Tensor& margin,
                                    double num_pairs,
                                    const RewardModelOptions& options);

}  // namespace banyan::algo
