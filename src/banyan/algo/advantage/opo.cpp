// OPO (Hao et al., "On-policy RL with optimal reward baseline", 2025): the baseline weighs each
// reward by the length of its response,
//   a_i = r_i - sum_j n_j r_j / sum_j n_j over the group
// A group of one gets 0 (T20). n_j counts the masked tokens of the trajectory (of all its outputs).
#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/groups.h"

namespace banyan::algo::detail {

AdvantageResult opo(const AdvantageInput& input, const AdvantageOptions&) {
  return outcome(input, [](const std::vector<Member>& group) {
    std::vector<double> advantage(group.size(), 0.0);
    if (statistics(rewards_of(group)).is_flat) return advantage;
    double weighted = 0.0, tokens = 0.0;
    for (const Member& member : group) {
      weighted += member.num_tokens * member.reward;
      tokens += member.num_tokens;
    }
    for (size_t i = 0; i < group.size(); ++i) advantage[i] = group[i].reward - weighted / tokens;
    return advantage;
  });
}

}  // namespace banyan::algo::detail
