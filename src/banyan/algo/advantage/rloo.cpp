// RLOO (Kool et al., 2019; Ahmadian et al., "Back to basics", 2024): the baseline is the mean of
// the others,
//   a_i = r_i - mean of r_j, j != i = G / (G - 1) (r_i - mean_g)
// A group of one gets 0 (T20); verl's two versions differ there (T19), here both names are this
// one.
#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/groups.h"

namespace banyan::algo::detail {

AdvantageResult rloo(const AdvantageInput& input, const AdvantageOptions&) {
  return outcome(input, [](const std::vector<Member>& group) {
    std::vector<double> advantage = grpo_rule(rewards_of(group), /*norm_by_std=*/false);
    const auto size = static_cast<double>(group.size());
    for (double& value : advantage) value *= size > 1.0 ? size / (size - 1.0) : 0.0;
    return advantage;
  });
}

}  // namespace banyan::algo::detail
