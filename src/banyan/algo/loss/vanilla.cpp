// The clipped policy loss of PPO (Schulman et al., 2017) with the dual clip of Ye et al. (2020):
//   L = max(-A rho, -A clip(rho, 1 - eL, 1 + eH));  where A < 0: min(L, -A c)
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo::detail {

PolicyLossResult vanilla(const LossTokens& tokens,
                         const at::Tensor& log_prob,
                         const LossOptions& options) {
  const at::Tensor& advantage = tokens.advantage;
  const at::Tensor ratio = at::exp(log_ratio(log_prob, tokens.old_log_prob));
  const at::Tensor plain = -advantage * ratio;
  const at::Tensor bounded =
      -advantage * at::clamp(ratio, 1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high);
  const at::Tensor pessimistic = at::maximum(plain, bounded);
  const at::Tensor cap = -advantage * options.clip_ratio_c;
  const at::Tensor negative = advantage < 0;

  PolicyLossResult result;
  result.loss = at::where(negative, at::minimum(pessimistic, cap), pessimistic);
  result.clipped = (bounded > plain).to(log_prob.scalar_type());
  result.clipped_lower = (negative & (pessimistic > cap)).to(log_prob.scalar_type());
  return result;
}

}  // namespace banyan::algo::detail
