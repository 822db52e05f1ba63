#include "banyan/train/correction.h"

#include "banyan/train/passes.h"

namespace banyan::train {
namespace {

// The law that drew the tokens: renormalised over what top-k and top-p kept (T29).
const std::vector<float>& sampling_law(const Trajectory& trajectory) {
  return trajectory.sampled_log_probs.empty() ? trajectory.rollout_log_probs
                                              : trajectory.sampled_log_probs;
}

}  // namespace

algo::CorrectionOptions correction_options(const CorrectionConfig& config) {
  algo::CorrectionOptions options;
  options.rollout_is = config.rollout_is.value_or("");
  options.rollout_is_threshold = config.rollout_is_threshold.value_or("");
  options.rollout_is_batch_normalize = config.rollout_is_batch_normalize;
  options.rollout_rs = config.rollout_rs.value_or("");
  options.rollout_rs_threshold = config.rollout_rs_threshold.value_or("");
  return options;
}

Correction correct(const Batch& batch,
                   const std::vector<int64_t>& which,
                   const algo::PerToken& log_prob,
                   const algo::CorrectionOptions& options) {
  algo::PerToken rollout;
  for (const int64_t i : which) {
    const Trajectory& trajectory = batch.trajectories[i];
    rollout.push_back(masked(trajectory, sampling_law(trajectory)));
  }
  algo::CorrectionResult result = algo::correction(log_prob, rollout, options);
  Correction out{token_lists(result.weight), {}, std::move(result.metrics)};
  for (const std::vector<uint8_t>& row : result.keep) {
    out.keep.push_back(token_lists({std::vector<double>(row.begin(), row.end())})[0]);
  }
  return out;
}

algo::MetricMap correct_batch(const algo::CorrectionOptions& options, Batch& batch) {
  const std::vector<int64_t> which = valid_of(batch);
  const algo::PerToken all = per_token(batch, batch.old_log_prob);
  algo::PerToken log_prob;
  for (const int64_t i : which) log_prob.push_back(all[i]);
  Correction correction = correct(batch, which, log_prob, options);
  batch.weight = spread(which, batch.size(), std::move(correction.weight));
  batch.keep = spread(which, batch.size(), std::move(correction.keep));
  return std::move(correction.metrics);
}

TokenLists rollout_log_probs(const Batch& batch) {
  algo::PerToken out;
  for (const Trajectory& trajectory : batch.trajectories) {
    out.push_back(masked(trajectory, trajectory.rollout_log_probs));
  }
  return token_lists(out);
}

}  // namespace banyan::train
