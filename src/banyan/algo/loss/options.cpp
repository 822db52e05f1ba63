// The policy loss by its name, the aggregation that goes with it, and the checks of the options.
#include <cmath>

#include "banyan/algo/detail/entries.h"
#include "banyan/algo/user_function.h"

namespace banyan::algo {
namespace {

void check_at_least(const char* key, double value, double least) {
  BANYAN_CHECK(std::isfinite(value) && value >= least,
               "[actor.",
               key,
               "] wanted a finite number >= ",
               least,
               ", got ",
               value);
}

void check_above(const char* key, double value, double bound) {
  BANYAN_CHECK(std::isfinite(value) && value > bound,
               "[actor.",
               key,
               "] wanted a finite number > ",
               bound,
               ", got ",
               value);
}

// sequence-level losses bring their own mean over sequences (T11, T12).
void check_aggregation(const PolicyLoss& loss, const LossOptions& options) {
  if (options.loss_agg_mode.empty()) return;
  detail::check_aggregation_mode(options.loss_agg_mode);
  BANYAN_CHECK(loss.forced_aggregation.empty() || loss.forced_aggregation == options.loss_agg_mode,
               "[actor.loss_agg_mode] wanted ",
               loss.forced_aggregation,
               " (or null) with policy_loss.loss_mode=",
               options.loss_mode,
               ", got ",
               options.loss_agg_mode,
               ": the mean over sequences is part of that loss");
}

void check_mode_options(const LossOptions& options) {
  const std::string& mode = options.loss_mode;
  if (mode == "vanilla") check_above("clip_ratio_c", options.clip_ratio_c, 1.0);
  if (mode == "dppo_tv" || mode == "dppo_kl") {
    check_above("policy_loss.dppo_ratio_cap", options.dppo_ratio_cap, 0.0);
  }
  if (mode == "sapo") {
    check_above("tau_pos", options.tau_pos, 0.0);
    check_above("tau_neg", options.tau_neg, 0.0);
  }
  if (mode == "dro") check_above("policy_loss.dro_beta", options.dro_beta, 0.0);
  if (mode == "kl_cov") {
    check_at_least("policy_loss.kl_cov_ratio", options.kl_cov_ratio, 0.0);
    check_at_least("policy_loss.ppo_kl_coef", options.ppo_kl_coef, 0.0);
  }
  if (mode == "clip_cov") {
    check_at_least("policy_loss.clip_cov_ratio", options.clip_cov_ratio, 0.0);
    BANYAN_CHECK(options.clip_cov_lb < options.clip_cov_ub,
                 "[actor.policy_loss.clip_cov_lb] wanted a number below clip_cov_ub (",
                 options.clip_cov_ub,
                 "), got ",
                 options.clip_cov_lb);
  }
}

}  // namespace

PolicyLoss policy_loss(const std::string& name) {
  if (!is_user_function(name)) {
    BANYAN_CHECK(
        name != "bypass_mode",
        "[actor.policy_loss.loss_mode] wanted the loss itself, got bypass_mode; set "
        "algorithm.rollout_correction.bypass_mode=true and keep the loss: bypass only takes "
        "the rollout's log-probabilities as the old ones");
    return policy_losses().get(name);
  }
  return user_loss(name);
}

std::string aggregation_mode(const LossOptions& options) {
  if (!options.loss_agg_mode.empty()) return options.loss_agg_mode;
  const std::string forced = policy_loss(options.loss_mode).forced_aggregation;
  return forced.empty() ? "token-mean" : forced;
}

void check_loss_options(const LossOptions& options) {
  check_aggregation(policy_loss(options.loss_mode), options);
  check_at_least("clip_ratio_low", options.clip_ratio_low, 0.0);
  check_at_least("clip_ratio_high", options.clip_ratio_high, 0.0);
  check_mode_options(options);
  BANYAN_CHECK(std::isfinite(options.entropy_coeff),
               "[actor.entropy_coeff] wanted a finite number, got ",
               options.entropy_coeff);
  if (!options.use_kl_loss) return;
  detail::check_kl_loss_type(options.kl_loss_type);
  check_at_least("kl_loss_coef", options.kl_loss_coef, 0.0);
}

}  // namespace banyan::algo
