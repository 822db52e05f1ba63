// DPPO (Qi et al., "Rethinking the trust region in LLM reinforcement learning", 2026): tokens whose
// divergence from the old policy grew too large lose their gradient, by a mask M instead of a clip,
//   L = -A sg(min(rho, c)) l M, p = exp(l), p_old = exp(l_old)
//   dppo_tv: M = [p - p_old <= eH] if A > 0, else [p - p_old >= -eL]
//   dppo_kl: K = p_old (l_old - l) + (1 - p_old) log((1 - p_old + 1e-8) / (1 - p + 1e-8))
//            M = [K <= eH or p <= p_old] if A > 0, else [K <= eL or p >= p_old]
// c is policy_loss.dppo_ratio_cap = 20; verl takes clip_ratio_c, whose default 3 is too small here
// (T2).
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/where.h>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo::detail {
namespace {

constexpr double kFloor = 1e-8;

PolicyLossResult masked_loss(const LossTokens& tokens,
                             const at::Tensor& log_prob,
                             const at::Tensor& kept,
                             const LossOptions& options) {
  const at::Tensor ratio = safe_exp(log_prob - tokens.old_log_prob).detach();
  const at::Tensor mask = kept.to(at::kDouble);
  PolicyLossResult result;
  result.loss = -tokens.advantage * at::clamp_max(ratio, options.dppo_ratio_cap) * log_prob * mask;
  result.clipped = 1.0 - mask;
  result.clipped_lower = (ratio > options.dppo_ratio_cap).to(at::kDouble) * mask;
  return result;
}

}  // namespace

PolicyLossResult dppo_tv_loss(const LossTokens& tokens,
                              const at::Tensor& log_prob,
                              const LossOptions& options) {
  const at::Tensor gap = at::exp(log_prob.detach()) - at::exp(tokens.old_log_prob);
  const at::Tensor kept = at::where(
      tokens.advantage > 0, gap <= options.clip_ratio_high, gap >= -options.clip_ratio_low);
  return masked_loss(tokens, log_prob, kept, options);
}

PolicyLossResult dppo_kl_loss(const LossTokens& tokens,
                              const at::Tensor& log_prob,
                              const LossOptions& options) {
  const at::Tensor l = log_prob.detach();
  const at::Tensor p = at::exp(l);
  const at::Tensor p_old = at::exp(tokens.old_log_prob);
  const at::Tensor kl = p_old * (tokens.old_log_prob - l) +
                        (1.0 - p_old) * at::log((1.0 - p_old + kFloor) / (1.0 - p + kFloor));
  const at::Tensor kept = at::where(tokens.advantage > 0,
                                    (kl <= options.clip_ratio_high).logical_or(p <= p_old),
                                    (kl <= options.clip_ratio_low).logical_or(p >= p_old));
  return masked_loss(tokens, log_prob, kept, options);
}

}  // namespace banyan::algo::detail
