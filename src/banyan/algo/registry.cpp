// The lists of what a configuration can name. Add a file, then its line here.
#include "banyan/algo/detail/entries.h"

namespace banyan::algo {

const Registry<Advantage>& advantages() {
  static const Registry<Advantage> registry = [] {
    Registry<Advantage> list("algorithm.adv_estimator");
    list.add("gae", {.function = detail::gae, .needs_value = true});
    list.add("grpo", {.function = detail::grpo, .is_group_relative = true});
    list.add("grpo_passk", {.function = detail::grpo_passk, .is_group_relative = true});
    list.add("gdpo",
             {.function = detail::gdpo, .needs_components = true, .is_group_relative = true});
    list.add("reinforce_plus_plus", {.function = detail::reinforce_plus_plus});
    list.add("reinforce_plus_plus_baseline",
             {.function = detail::reinforce_plus_plus_baseline, .is_group_relative = true});
    list.add("rloo", {.function = detail::rloo, .is_group_relative = true});
    list.add("opo", {.function = detail::opo, .is_group_relative = true});
    list.add("remax", {.function = detail::remax, .needs_greedy = true});
    list.add("gpg", {.function = detail::gpg, .is_group_relative = true});
    list.add("optimal_token_baseline",
             {.function = detail::optimal_token_baseline,
              .needs_sum_squares = true,
              .is_group_relative = true});
    list.add("tir_optimal_token_baseline",
             {.function = detail::tir_optimal_token_baseline,
              .needs_sum_squares = true,
              .is_group_relative = true});
    // verl's faster twins of the same formulas (T19).
    list.add("grpo_vectorized", list.get("grpo"));
    list.add("rloo_vectorized", list.get("rloo"));
    return list;
  }();
  return registry;
}

const Registry<PolicyLoss>& policy_losses() {
  static const Registry<PolicyLoss> registry = [] {
    constexpr const char* kSequenceMean = "seq-mean-token-mean";
    Registry<PolicyLoss> list("actor.policy_loss.loss_mode");
    list.add("vanilla", {.function = detail::vanilla_loss});
    list.add("dppo_tv", {.function = detail::dppo_tv_loss});
    list.add("dppo_kl", {.function = detail::dppo_kl_loss});
    list.add("gspo", {.function = detail::gspo_loss, .forced_aggregation = kSequenceMean});
    list.add("sapo", {.function = detail::sapo_loss, .forced_aggregation = kSequenceMean});
    list.add("gpg", {.function = detail::gpg_loss, .has_ratio = false});
    list.add("clip_cov", {.function = detail::clip_cov_loss, .scope = PolicyScope::kMiniBatch});
    list.add("kl_cov", {.function = detail::kl_cov_loss, .scope = PolicyScope::kMiniBatch});
    list.add("geo_mean",
             {.function = detail::geo_mean_loss,
              .forced_aggregation = kSequenceMean,
              .applies_weight = true});
    list.add("dro", {.function = detail::dro_loss, .has_ratio = false});
    list.add("cispo", {.function = detail::cispo_loss});
    return list;
  }();
  return registry;
}

const Registry<KlEstimator>& kl_estimators() {
  static const Registry<KlEstimator> registry = [] {
    Registry<KlEstimator> list("actor.kl_loss_type");
    list.add("kl", detail::kl_k1);
    list.add("k1", detail::kl_k1);
    list.add("abs", detail::kl_abs);
    list.add("mse", detail::kl_k2);
    list.add("k2", detail::kl_k2);
    list.add("low_var_kl", detail::kl_k3);
    list.add("k3", detail::kl_k3);
    return list;
  }();
  return registry;
}

}  // namespace banyan::algo
