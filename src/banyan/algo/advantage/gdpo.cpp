// GDPO, group reward-decoupled normalisation (Liu et al., 2026): each reward component k is
// normalised in its group by the GRPO rule before they are added,
//   A = whiten( sum_k w_k a_ik ) over all masked tokens.
// The components come from the scorer's entries named by algorithm.gdpo_reward_keys; a group of one
// is left out of the statistics and gets 0 (T20).
#include <algorithm>

#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/groups.h"

namespace banyan::algo::detail {

AdvantageResult gdpo(const AdvantageInput& input, const AdvantageOptions& options) {
  AdvantageResult result = outcome(input, [&](const std::vector<Member>& group) {
    std::vector<double> sum(group.size(), 0.0);
    for (size_t k = 0; k < options.gdpo_reward_keys.size(); ++k) {
      const std::vector<double>& component = input.components.at(options.gdpo_reward_keys[k]);
      const double weight =
          options.gdpo_reward_weights.empty() ? 1.0 : options.gdpo_reward_weights[k];
      std::vector<double> values;
      for (const Member& member : group) values.push_back(component[member.row]);
      const std::vector<double> part = grpo_rule(values, options.norm_adv_by_std_in_grpo);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += weight * part[i];
    }
    return sum;
  });
  whiten(rows_with_peers(input), result.advantage);
  result.returns = result.advantage;
  return result;
}

}  // namespace banyan::algo::detail
