// Rollout correction in the trainer (algorithms spec section 7): where l_roll comes from, and when.
//
// decoupled  u = l_old - l_roll, once per batch, before the advantages (T24)
// bypass     l_old := l_roll; weights and rejection come from u = l - l_roll of a pass without
//            gradients over each whole mini-batch (T35)
#pragma once

#include "banyan/algo/correction.h"
#include "banyan/core/config.h"
#include "banyan/train/batch.h"

namespace banyan::train {

algo::CorrectionOptions correction_options(const CorrectionConfig& config);

struct Correction {
  TokenLists weight;        // per trajectory asked for; empty: 1
  TokenLists keep;          // likewise
  algo::MetricMap metrics;  // names of "rollout_corr/"
};

// `log_prob` [which][n_i] are those of the policy that is compared with the rollout.
Correction correct(const Batch& batch,
                   const std::vector<int64_t>& which,
                   const algo::PerToken& log_prob,
                   const algo::CorrectionOptions& options);

// The decoupled form: fills weight and keep of the batch; returns the metrics.
algo::MetricMap correct_batch(const algo::CorrectionOptions& options, Batch& batch);

// l_roll of the full softmax, as old log-probabilities (bypass).
TokenLists rollout_log_probs(const Batch& batch);

}  // namespace banyan::train
