// REINFORCE++ (Hu et al., 2025): discounted rewards to go, whitened over the batch,
//   R_t = r_t + gamma R_(t+1), A = whiten(R)
// No critic and no group. Masked tokens only: positions with mask 0 pass the sum through.
#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/groups.h"

namespace banyan::algo::detail {

AdvantageResult reinforce_plus_plus(const AdvantageInput& input, const AdvantageOptions& options) {
  AdvantageResult result;
  result.returns = rewards_to_go(input, options.gamma);
  result.advantage = result.returns;
  whiten(rows_that_take_part(input), result.advantage);
  return result;
}

}  // namespace banyan::algo::detail
