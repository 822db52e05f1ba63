// CISPO (MiniMax, "MiniMax-M1", 2025): the clipped ratio weighs the log-probability and takes no
// gradient itself, so every token keeps one: L = -sg(clip(rho, 1 - eL, 1 + eH)) A l.
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo::detail {

PolicyLossResult cispo_loss(const LossTokens& tokens,
                            const at::Tensor& log_prob,
                            const LossOptions& options) {
  const at::Tensor ratio = safe_exp(log_prob.detach() - tokens.old_log_prob);
  const at::Tensor bounded =
      at::clamp(ratio, 1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high);
  PolicyLossResult result;
  result.loss = -bounded * tokens.advantage * log_prob;
  result.clipped = (bounded != ratio).to(at::kDouble);
  return result;
}

}  // namespace banyan::algo::detail
