// GSPO (Zheng et al., "Group sequence policy optimization", 2025), its token form: the ratio of a
// whole sequence, normalised by length,
//   s_i = mean over the tokens of x, ratio = exp(sg(s_i) + l - sg(l))
//   L = max(-A ratio, -A clip(ratio, 1 - eL, 1 + eH)), no dual clip
// The exponent is clamped to +-20 (T30; verl: at most 10). The mean over sequences is part of the
// algorithm: seq-mean-token-mean is forced (T12).
#include <ATen/TensorOperators.h>

#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/tokens.h"

namespace banyan::algo::detail {

PolicyLossResult gspo_loss(const LossTokens& tokens,
                           const at::Tensor& log_prob,
                           const LossOptions& options) {
  const at::Tensor mean = sequence_mean((log_prob - tokens.old_log_prob).detach(), tokens);
  const at::Tensor ratio = safe_exp(mean + (log_prob - log_prob.detach()));
  const auto [loss, clipped] = clipped_surrogate(tokens.advantage, ratio, options);
  PolicyLossResult result;
  result.loss = loss;
  result.clipped = clipped.to(at::kDouble);
  return result;
}

}  // namespace banyan::algo::detail
