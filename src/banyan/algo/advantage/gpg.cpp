// GPG (Chu et al., "GPG: a simple and strong reinforcement learning baseline", 2025): groups whose
// rewards are all equal give no gradient, so the others are scaled up,
//   a_i = alpha (r_i - mean_g), alpha = S / max(1, trajectories in groups whose rewards differ)
// verl counts non-zero rewards instead, so that groups with all answers right count as informative
// (T28). S counts real trajectories (T18).
#include <algorithm>

#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/groups.h"

namespace banyan::algo::detail {

AdvantageResult gpg(const AdvantageInput& input, const AdvantageOptions&) {
  double all = 0.0, informative = 0.0;
  for (const auto& [id, group] : groups_of(input)) {
    const auto size = static_cast<double>(group.size());
    all += size;
    if (!statistics(rewards_of(group)).is_flat) informative += size;
  }
  const double alpha = all / std::max(1.0, informative);
  return outcome(input, [&](const std::vector<Member>& group) {
    std::vector<double> advantage = grpo_rule(rewards_of(group), /*norm_by_std=*/false);
    for (double& value : advantage) value *= alpha;
    return advantage;
  });
}

}  // namespace banyan::algo::detail
