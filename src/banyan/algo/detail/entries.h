// What registry.cpp lists: one function per advantage estimator, policy loss and KL estimator, each
// in the file of its name.
#pragma once

#include "banyan/algo/advantage.h"
#include "banyan/algo/loss.h"

namespace banyan::algo::detail {

std::vector<double> grpo(const AdvantageInput& input, const AdvantageOptions& options);

PolicyLossResult vanilla(const LossTokens& tokens,
                         const at::Tensor& log_prob,
                         const LossOptions& options);

at::Tensor kl_k1(const at::Tensor& log_prob, const at::Tensor& ref_log_prob);
at::Tensor kl_abs(const at::Tensor& log_prob, const at::Tensor& ref_log_prob);
at::Tensor kl_k2(const at::Tensor& log_prob, const at::Tensor& ref_log_prob);
at::Tensor kl_k3(const at::Tensor& log_prob, const at::Tensor& ref_log_prob);

// x = log_prob - old_log_prob clamped to +-20, and exp(x): the one safe exponential of every ratio
// (T30).
at::Tensor log_ratio(const at::Tensor& log_prob, const at::Tensor& old_log_prob);

// KL of a *loss* type: an estimator, or "<estimator>+" (value of the estimator, gradient of k2;
// T32).
at::Tensor kl_loss(const std::string& type,
                   const at::Tensor& log_prob,
                   const at::Tensor& ref_log_prob,
                   const at::Tensor& log_ratio);

// Weights w [U] fp64 of the aggregation: agg(z) = sum_u w_u z_u. Linear in z for all five modes.
at::Tensor aggregation_weights(const LossTokens& tokens,
                               const std::string& mode,
                               const LossScale& scale);
void check_aggregation_mode(const std::string& mode);
void check_kl_loss_type(const std::string& type);

}  // namespace banyan::algo::detail
