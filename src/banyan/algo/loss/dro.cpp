// DRO (Richemond et al., "Offline regularised reinforcement learning for LLMs alignment", 2024),
// the policy part: L = -(A l - 0.5 dro_beta x^2), x = l - l_old. x is no exponent and stays
// unclamped.
#include <ATen/TensorOperators.h>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo::detail {

PolicyLossResult dro_loss(const LossTokens& tokens,
                          const at::Tensor& log_prob,
                          const LossOptions& options) {
  const at::Tensor x = log_prob - tokens.old_log_prob;
  PolicyLossResult result;
  result.loss = x * x * (0.5 * options.dro_beta) - tokens.advantage * log_prob;
  return result;
}

}  // namespace banyan::algo::detail
