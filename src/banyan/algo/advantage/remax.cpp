// ReMax (Li et al., 2023): the baseline is the score of a greedy response to the same prompt,
//   R_t = sum over s >= t of r_s, A_t = R_t - b_i
// The trainer generates the greedy responses and carries their scores in the batch (T27).
#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/groups.h"

namespace banyan::algo::detail {

AdvantageResult remax(const AdvantageInput& input, const AdvantageOptions&) {
  AdvantageResult result;
  result.returns = rewards_to_go(input, /*gamma=*/1.0);
  result.advantage = result.returns;
  for (size_t row = 0; row < result.advantage.size(); ++row) {
    if (!takes_part(input, row)) continue;
    for (double& value : result.advantage[row]) value -= input.greedy_score[row];
  }
  return result;
}

}  // namespace banyan::algo::detail
