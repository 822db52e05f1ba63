// REINFORCE++ with a group baseline (Hu et al., 2025): A = whiten(r_i - mean_g) over all masked
// tokens of the batch. A group of one is left out of the statistics and gets 0 (T20).
#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/groups.h"

namespace banyan::algo::detail {

AdvantageResult reinforce_plus_plus_baseline(const AdvantageInput& input, const AdvantageOptions&) {
  AdvantageResult result = outcome(input, [](const std::vector<Member>& group) {
    return grpo_rule(rewards_of(group), /*norm_by_std=*/false);
  });
  whiten(rows_with_peers(input), result.advantage);
  result.returns = result.advantage;
  return result;
}

}  // namespace banyan::algo::detail
