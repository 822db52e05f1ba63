// The parts of step_metrics, by where their figures come from.
#pragma once

#include <algorithm>
#include <string>

#include "banyan/train/metrics.h"

namespace banyan::train::detail {

// Weighted mean, and max and min, of a stream of values.
class Spread {
 public:
  void add(double value, double weight = 1.0) {
    if (weight == 0.0) return;
    max_ = weight_ == 0.0 ? value : std::max(max_, value);
    min_ = weight_ == 0.0 ? value : std::min(min_, value);
    sum_ += weight * value;
    weight_ += weight;
  }
  void write(const std::string& name, Metrics& metrics) const {
    if (weight_ == 0.0) return;
    metrics[name + "/mean"] = sum_ / weight_;
    metrics[name + "/max"] = max_;
    metrics[name + "/min"] = min_;
  }

 private:
  double sum_ = 0.0, weight_ = 0.0, max_ = 0.0, min_ = 0.0;
};

// Samples, scores, groups, advantages, returns, values, variance_proxy/.
void data_metrics(const Config& config, const StepResult& result, Metrics& metrics);

// Losses and gradients of the actor and the critic, tries of the update, rollout_corr/.
void update_metrics(const Config& config, const StepResult& result, Metrics& metrics);

// Which weights drew the samples of a step: training/off_policy/.
void off_policy_metrics(const Batch& batch, int64_t step, Metrics& metrics);

// Rollout and trainer compared token by token: training/rollout_probs_diff_*.
void rollout_gap_metrics(const Config& config, const StepResult& result, Metrics& metrics);

}  // namespace banyan::train::detail
