// Which weights drew the samples of a step, by trajectory: with v the versions of its tokens,
//   spans = max v - min v + 1    staleness = step - 1 - max v    worst = step - 1 - min v
// A version is the number of the step after which the weights were.
#include "banyan/train/detail/metrics.h"
#include "banyan/train/unfinished.h"

namespace banyan::train::detail {

void off_policy_metrics(const Batch& batch, int64_t step, Metrics& metrics) {
  Spread spans, staleness, worst, version;
  for (const Trajectory& trajectory : batch.trajectories) {
    const std::optional<WeightVersions> versions = weight_versions(trajectory);
    if (!versions) continue;
    spans.add(static_cast<double>(versions->last - versions->first + 1));
    staleness.add(static_cast<double>(step - 1 - versions->last));
    worst.add(static_cast<double>(step - 1 - versions->first));
    version.add(static_cast<double>(versions->last));
  }
  spans.write("training/off_policy/trajectory_spans", metrics);
  staleness.write("training/off_policy/trajectory_staleness", metrics);
  worst.write("training/off_policy/trajectory_staleness_worst", metrics);
  version.write("rollout/weight_version", metrics);
}

}  // namespace banyan::train::detail
