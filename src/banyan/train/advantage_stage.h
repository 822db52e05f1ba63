// Scores to advantages: token rewards, KL in the reward, rollout correction, the estimator, and
// PF-PPO's draw, in that order (algorithms spec sections 1 and 5-7, T24).
#pragma once

#include "banyan/algo/metric.h"
#include "banyan/algo/reward_kl.h"
#include "banyan/core/config.h"
#include "banyan/train/batch.h"

namespace banyan::train {

struct AdvantageStats {
  algo::RewardKl reward_kl;
  double reward_kl_coef = 0.0;  // of this step, before the controller moved
  algo::MetricMap correction;   // names of "rollout_corr/"
};

algo::AdvantageOptions advantage_options(const AlgorithmConfig& algorithm);
algo::KlController kl_controller(const KlControlConfig& config);

// Fills token_reward, weight, keep, advantage, returns and order of the batch. `controller` is null
// without KL in the reward; it moves after its coefficient was used.
AdvantageStats set_advantages(const Config& config,
                              int64_t step,
                              algo::KlController* controller,
                              Batch& batch);

}  // namespace banyan::train
