// r_it = score_it - beta kl_it on the masked tokens, kl from the estimator on (l_old, l_ref).
#include "banyan/algo/reward_kl.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo {
namespace {

at::Tensor to_tensor(const std::vector<double>& values) {
  at::Tensor out = at::empty({static_cast<int64_t>(values.size())}, at::kDouble);
  std::copy(values.begin(), values.end(), out.mutable_data_ptr<double>());
  return out;
}

void check_positive(const char* key, double value) {
  BANYAN_CHECK(std::isfinite(value) && value > 0.0,
               "[algorithm.kl_ctrl.",
               key,
               "] wanted a finite number > 0, got ",
               value);
}

}  // namespace

PerToken token_rewards(const std::vector<double>& score, const std::vector<int64_t>& num_tokens) {
  PerToken rewards;
  for (size_t i = 0; i < score.size(); ++i) {
    rewards.emplace_back(static_cast<size_t>(num_tokens[i]), 0.0);
    if (!rewards[i].empty()) rewards[i].back() = score[i];
  }
  return rewards;
}

void check_kl_penalty(const std::string& kl_penalty) {
  const std::string base = detail::kl_base(kl_penalty);
  const std::vector<std::string> known = kl_estimators().names();
  BANYAN_CHECK(std::find(known.begin(), known.end(), base) != known.end(),
               "[algorithm.kl_penalty] wanted one of kl, k1, abs, mse, k2, low_var_kl, k3, got '",
               kl_penalty,
               "'");
}

RewardKl subtract_kl(const PerToken& old_log_prob,
                     const PerToken& ref_log_prob,
                     const std::vector<uint8_t>& valid,
                     const std::string& kl_penalty,
                     double beta,
                     PerToken& token_reward) {
  check_kl_penalty(kl_penalty);
  const KlEstimator estimator = kl_estimators().get(detail::kl_base(kl_penalty));
  RewardKl out;
  for (size_t i = 0; i < token_reward.size(); ++i) {
    if (!valid[i] || token_reward[i].empty()) continue;
    BANYAN_ASSERT(old_log_prob[i].size() == token_reward[i].size() &&
                      ref_log_prob[i].size() == token_reward[i].size(),
                  "subtract_kl: row ",
                  i);
    const at::Tensor kl = estimator(to_tensor(old_log_prob[i]), to_tensor(ref_log_prob[i]));
    const double* values = kl.const_data_ptr<double>();
    double sum = 0.0;
    for (size_t t = 0; t < token_reward[i].size(); ++t) {
      token_reward[i][t] -= beta * values[t];
      sum += values[t];
    }
    out.kl += sum / static_cast<double>(token_reward[i].size());
    out.num_sequences += 1.0;
  }
  if (out.num_sequences > 0.0) out.kl /= out.num_sequences;
  return out;
}

KlController::KlController(const std::string& type,
                           double kl_coef,
                           double target_kl,
                           double horizon)
    : adaptive_(type == "adaptive"), coef_(kl_coef), target_(target_kl), horizon_(horizon) {
  BANYAN_CHECK(type == "fixed" || adaptive_,
               "[algorithm.kl_ctrl.type] wanted fixed or adaptive, got '",
               type,
               "'");
  BANYAN_CHECK(std::isfinite(kl_coef) && kl_coef >= 0.0,
               "[algorithm.kl_ctrl.kl_coef] wanted a finite number >= 0, got ",
               kl_coef);
  if (!adaptive_) return;
  check_positive("target_kl", target_kl);
  check_positive("horizon", horizon);
}

void KlController::update(const RewardKl& measured) {
  if (!adaptive_) return;
  const double error = std::clamp(measured.kl / target_ - 1.0, -0.2, 0.2);
  coef_ *= 1.0 + error * measured.num_sequences / horizon_;
}

}  // namespace banyan::algo
