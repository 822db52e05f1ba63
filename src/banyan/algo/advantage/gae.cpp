// GAE (Schulman et al., "High-dimensional continuous control using generalized advantage
// estimation", 2016), backwards over the masked tokens:
//   d_t = r_t + gamma V_(t+1) - V_t, a_t = d_t + gamma lam a_(t+1), V_(T+1) = a_(T+1) = 0
//   R = a + V, A = whiten(a) over all masked tokens of the batch (T25, T26)
#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/groups.h"

namespace banyan::algo::detail {

AdvantageResult gae(const AdvantageInput& input, const AdvantageOptions& options) {
  AdvantageResult result;
  result.advantage = zeros_like_rewards(input);
  result.returns = result.advantage;
  for (size_t row = 0; row < input.token_reward.size(); ++row) {
    if (!takes_part(input, row)) continue;
    const std::vector<double>& reward = input.token_reward[row];
    const std::vector<double>& value = input.value[row];
    double next_value = 0.0, next_advantage = 0.0;
    for (size_t t = reward.size(); t-- > 0;) {
      const double delta = reward[t] + options.gamma * next_value - value[t];
      next_advantage = delta + options.gamma * options.lam * next_advantage;
      next_value = value[t];
      result.advantage[row][t] = next_advantage;
      result.returns[row][t] = next_advantage + value[t];
    }
  }
  whiten(rows_that_take_part(input), result.advantage);
  return result;
}

}  // namespace banyan::algo::detail
