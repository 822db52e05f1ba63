// Pass@k training (Chen et al., "Pass@k training", 2025, as verl's grpo_passk): only the best
// member of a group learns,
//   a_best = (r_max - r_second) / (std_g + 1e-6), no division without norm_adv_by_std_in_grpo
// and all others get 0. A group of one gets 0 like any relative advantage (T20; an error in verl).
#include <algorithm>

#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/groups.h"

namespace banyan::algo::detail {

AdvantageResult grpo_passk(const AdvantageInput& input, const AdvantageOptions& options) {
  return outcome(input, [&](const std::vector<Member>& group) {
    const std::vector<double> rewards = rewards_of(group);
    std::vector<double> advantage(rewards.size(), 0.0);
    const GroupStatistics figures = statistics(rewards);
    if (figures.is_flat) return advantage;
    const auto best = std::max_element(rewards.begin(), rewards.end()) - rewards.begin();
    double second = *std::min_element(rewards.begin(), rewards.end());
    for (size_t i = 0; i < rewards.size(); ++i) {
      if (static_cast<int64_t>(i) != best) second = std::max(second, rewards[i]);
    }
    const double divisor = options.norm_adv_by_std_in_grpo ? figures.std + 1e-6 : 1.0;
    advantage[best] = (rewards[best] - second) / divisor;
    return advantage;
  });
}

}  // namespace banyan::algo::detail
