// GRPO (Shao et al., "DeepSeekMath", 2024): a_i = (r_i - mean_g) / (std_g + 1e-6), std with G - 1.
// Dr.GRPO (Liu et al., "Understanding R1-Zero-like training", 2025): a_i = r_i - mean_g.
// A group of one and a group of equal rewards get exactly 0 (T20, T21). `grpo_vectorized` is the
// same formula under verl's second name (T19).
#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/groups.h"

namespace banyan::algo::detail {

AdvantageResult grpo(const AdvantageInput& input, const AdvantageOptions& options) {
  return outcome(input, [&](const std::vector<Member>& group) {
    return grpo_rule(rewards_of(group), options.norm_adv_by_std_in_grpo);
  });
}

}  // namespace banyan::algo::detail
