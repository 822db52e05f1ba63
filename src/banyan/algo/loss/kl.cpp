// KL estimators of (l, l_ref), d = l - l_ref (Schulman, "Approximating KL divergence", 2020):
//   k1 = d, abs = |d|, k2 = d^2 / 2, k3 = clamp(exp(v) - v - 1, -10, 10) with v = clamp(-d, -20,
//   20)
// As a loss, k1 has zero expected gradient and is refused (T7). "<name>+" has the value of the
// estimator and the gradient of k2, weighted by the ratio so that it stays exact off-policy (T32).
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/exp.h>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo::detail {
namespace {

constexpr double kMaxExponent = 20.0;
constexpr double kMaxK3 = 10.0;

bool has_plus(const std::string& type) { return !type.empty() && type.back() == '+'; }

}  // namespace

std::string kl_base(const std::string& type) {
  return has_plus(type) ? type.substr(0, type.size() - 1) : type;
}

at::Tensor kl_k1(const at::Tensor& log_prob, const at::Tensor& ref_log_prob) {
  return log_prob - ref_log_prob;
}

at::Tensor kl_abs(const at::Tensor& log_prob, const at::Tensor& ref_log_prob) {
  return at::abs(log_prob - ref_log_prob);
}

at::Tensor kl_k2(const at::Tensor& log_prob, const at::Tensor& ref_log_prob) {
  const at::Tensor d = log_prob - ref_log_prob;
  return d * d * 0.5;
}

at::Tensor kl_k3(const at::Tensor& log_prob, const at::Tensor& ref_log_prob) {
  const at::Tensor v = at::clamp(ref_log_prob - log_prob, -kMaxExponent, kMaxExponent);
  return at::clamp(at::exp(v) - v - 1.0, -kMaxK3, kMaxK3);
}

at::Tensor safe_exp(const at::Tensor& exponent) {
  return at::exp(at::clamp(exponent, -kMaxExponent, kMaxExponent));
}

at::Tensor log_ratio(const at::Tensor& log_prob, const at::Tensor& old_log_prob) {
  return at::clamp(log_prob - old_log_prob, -kMaxExponent, kMaxExponent);
}

at::Tensor kl_loss(const std::string& type,
                   const at::Tensor& log_prob,
                   const at::Tensor& ref_log_prob,
                   const at::Tensor& log_ratio) {
  const at::Tensor value = kl_estimators().get(kl_base(type))(log_prob, ref_log_prob);
  if (!has_plus(type)) return value;
  const at::Tensor k2 = kl_k2(log_prob, ref_log_prob);
  return at::exp(log_ratio).detach() * (k2 - k2.detach() + value.detach());
}

void check_kl_loss_type(const std::string& type) {
  kl_estimators().get(kl_base(type));
  BANYAN_CHECK(type != "k1" && type != "kl",
               "[actor.kl_loss_type] wanted a loss with a gradient, got '",
               type,
               "', whose expected gradient is 0; write '",
               type,
               "+' or low_var_kl");
}

}  // namespace banyan::algo::detail
