// What registry.cpp lists: one function per advantage estimator, policy loss and KL estimator, each
// in the file of its name.
#pragma once

#include "banyan/algo/advantage.h"
#include "banyan/algo/loss.h"

namespace banyan::algo::detail {

AdvantageResult gae(const AdvantageInput& input, const AdvantageOptions& options);
AdvantageResult grpo(const AdvantageInput& input, const AdvantageOptions& options);
AdvantageResult grpo_passk(const AdvantageInput& input, const AdvantageOptions& options);
AdvantageResult gdpo(const AdvantageInput& input, const AdvantageOptions& options);
AdvantageResult reinforce_plus_plus(const AdvantageInput& input, const AdvantageOptions& options);
AdvantageResult reinforce_plus_plus_baseline(const AdvantageInput& input,
                                             const AdvantageOptions& options);
AdvantageResult rloo(const AdvantageInput& input, const AdvantageOptions& options);
AdvantageResult opo(const AdvantageInput& input, const AdvantageOptions& options);
AdvantageResult remax(const AdvantageInput& input, const AdvantageOptions& options);
AdvantageResult gpg(const AdvantageInput& input, const AdvantageOptions& options);
AdvantageResult optimal_token_baseline(const AdvantageInput& input,
                                       const AdvantageOptions& options);
AdvantageResult tir_optimal_token_baseline(const AdvantageInput& input,
                                           const AdvantageOptions& options);

// Policy losses. Each takes (tokens, log_prob, options) as loss.h says.
using Loss = PolicyLossResult(const LossTokens&, const at::Tensor&, const LossOptions&);
Loss vanilla_loss, dppo_tv_loss, dppo_kl_loss, gspo_loss, sapo_loss, gpg_loss, clip_cov_loss,
    kl_cov_loss, geo_mean_loss, dro_loss, cispo_loss;

at::Tensor kl_k1(const at::Tensor& log_prob, const at::Tensor& ref_log_prob);
at::Tensor kl_abs(const at::Tensor& log_prob, const at::Tensor& ref_log_prob);
at::Tensor kl_k2(const at::Tensor& log_prob, const at::Tensor& ref_log_prob);
at::Tensor kl_k3(const at::Tensor& log_prob, const at::Tensor& ref_log_prob);

// x = log_prob - old_log_prob clamped to +-20, and exp(x): the one safe exponential of every ratio
// (T30).
at::Tensor log_ratio(const at::Tensor& log_prob, const at::Tensor& old_log_prob);
at::Tensor safe_exp(const at::Tensor& exponent);

// KL of a *loss* type: an estimator, or "<estimator>+" (value of the estimator, gradient of k2;
// T32).
at::Tensor kl_loss(const std::string& type,
                   const at::Tensor& log_prob,
                   const at::Tensor& ref_log_prob,
                   const at::Tensor& log_ratio);

// "k3+" -> "k3".
std::string kl_base(const std::string& type);

// Weights w [U] fp64 of the aggregation: agg(z) = sum_u w_u z_u. Linear in z for all five modes.
at::Tensor aggregation_weights(const LossTokens& tokens,
                               const std::string& mode,
                               const LossScale& scale);
void check_aggregation_mode(const std::string& mode);
void check_kl_loss_type(const std::string& type);

}  // namespace banyan::algo::detail
