// The lists of what a configuration can name. Add a file, then its line here.
#include "banyan/algo/detail/entries.h"

namespace banyan::algo {

const Registry<Advantage>& advantages() {
  static const Registry<Advantage> registry = [] {
    Registry<Advantage> list("algorithm.adv_estimator");
    list.add("grpo", detail::grpo);
    list.add("grpo_vectorized", detail::grpo);  // verl's faster twin of the same formula
    return list;
  }();
  return registry;
}

const Registry<PolicyLoss>& policy_losses() {
  static const Registry<PolicyLoss> registry = [] {
    Registry<PolicyLoss> list("actor.policy_loss.loss_mode");
    list.add("vanilla", detail::vanilla);
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
