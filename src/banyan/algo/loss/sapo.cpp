// SAPO (Gao et al., "Soft adaptive policy optimization", 2025): a smooth gate instead of a clip,
//   L = -A sigmoid(tau (rho - 1)) 4 / tau, tau = tau_pos if A > 0, else tau_neg
// seq-mean-token-mean is forced (T12).
#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo::detail {

PolicyLossResult sapo_loss(const LossTokens& tokens,
                           const at::Tensor& log_prob,
                           const LossOptions& options) {
  const at::Tensor ratio = safe_exp(log_prob - tokens.old_log_prob);
  const at::Tensor tau = at::where(tokens.advantage > 0,
                                   at::full_like(ratio.detach(), options.tau_pos),
                                   at::full_like(ratio.detach(), options.tau_neg));
  PolicyLossResult result;
  result.loss = -tokens.advantage * at::sigmoid(tau * (ratio - 1.0)) * 4.0 / tau;
  return result;
}

}  // namespace banyan::algo::detail
