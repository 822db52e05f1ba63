// The clipped policy loss of PPO (Schulman et al., 2017) with the dual clip of Ye et al. (2020):
//   L = max(-A rho, -A clip(rho, 1 - eL, 1 + eH));  where A < 0: min(L, -A c)
#include <ATen/TensorOperators.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>

#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/tokens.h"

namespace banyan::algo::detail {

PolicyLossResult vanilla_loss(const LossTokens& tokens,
                              const at::Tensor& log_prob,
                              const LossOptions& options) {
  const at::Tensor& advantage = tokens.advantage;
  const at::Tensor ratio = safe_exp(log_prob - tokens.old_log_prob);
  const auto [pessimistic, clipped] = clipped_surrogate(advantage, ratio, options);
  const at::Tensor cap = -advantage * options.clip_ratio_c;
  const at::Tensor negative = advantage < 0;

  PolicyLossResult result;
  result.loss = at::where(negative, at::minimum(pessimistic, cap), pessimistic);
  result.clipped = clipped.to(at::kDouble);
  result.clipped_lower = (negative & (pessimistic > cap)).to(at::kDouble);
  return result;
}

}  // namespace banyan::algo::detail
