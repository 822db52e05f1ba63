// The algorithms on plain numbers, for tests, notebooks and checks against other trainers:
// advantages, policy_loss, correction, value_loss, preference_loss, reward_model_loss, reward_kl.
// Dicts carry the fields of the C++ structs under their names; what is left out has the
// struct's value.
#include "banyan/algo/correction.h"
#include "banyan/algo/preference.h"
#include "banyan/algo/reward_kl.h"
#include "banyan/algo/value_loss.h"
#include "convert.h"

namespace banyan::bindings {
namespace {

template <typename T>
void read(const py::dict& from, const char* key, T& field) {
  if (from.contains(key) && !from[key].is_none()) field = from[key].cast<T>();
}

py::dict to_dict(const algo::MetricMap& metrics) {
  py::dict out;
  for (const auto& [name, metric] : metrics) out[py::str(name)] = algo::value_of(metric);
  return out;
}

py::dict run_advantages(const std::string& name, const py::dict& from, const py::dict& with) {
  algo::AdvantageInput input;
  read(from, "group", input.group);
  read(from, "valid", input.valid);
  read(from, "score", input.score);
  read(from, "token_reward", input.token_reward);
  read(from, "trajectory", input.trajectory);
  read(from, "value", input.value);
  read(from, "old_log_prob", input.old_log_prob);
  read(from, "sum_squares", input.sum_squares);
  read(from, "weight", input.weight);
  read(from, "position", input.position);
  read(from, "greedy_score", input.greedy_score);
  read(from, "components", input.components);
  if (input.valid.empty()) input.valid.assign(input.token_reward.size(), 1);
  algo::AdvantageOptions options;
  read(with, "norm_adv_by_std_in_grpo", options.norm_adv_by_std_in_grpo);
  read(with, "gamma", options.gamma);
  read(with, "lam", options.lam);
  read(with, "gdpo_reward_keys", options.gdpo_reward_keys);
  read(with, "gdpo_reward_weights", options.gdpo_reward_weights);
  algo::AdvantageResult result;
  {
    py::gil_scoped_release release;
    result = algo::compute_advantages(name, input, options);
  }
  py::dict out;
  out["advantage"] = result.advantage;
  out["returns"] = result.returns;
  return out;
}

algo::LossOptions loss_options(const std::string& name, const py::dict& from) {
  algo::LossOptions options;
  options.loss_mode = name;
  read(from, "loss_agg_mode", options.loss_agg_mode);
  read(from, "clip_ratio_low", options.clip_ratio_low);
  read(from, "clip_ratio_high", options.clip_ratio_high);
  read(from, "clip_ratio_c", options.clip_ratio_c);
  read(from, "dppo_ratio_cap", options.dppo_ratio_cap);
  read(from, "tau_pos", options.tau_pos);
  read(from, "tau_neg", options.tau_neg);
  read(from, "clip_cov_ratio", options.clip_cov_ratio);
  read(from, "clip_cov_lb", options.clip_cov_lb);
  read(from, "clip_cov_ub", options.clip_cov_ub);
  read(from, "kl_cov_ratio", options.kl_cov_ratio);
  read(from, "ppo_kl_coef", options.ppo_kl_coef);
  read(from, "dro_beta", options.dro_beta);
  read(from, "entropy_coeff", options.entropy_coeff);
  read(from, "use_kl_loss", options.use_kl_loss);
  read(from, "kl_loss_coef", options.kl_loss_coef);
  read(from, "kl_loss_type", options.kl_loss_type);
  read(from, "bypass_mode", options.bypass_mode);
  read(from, "seed", options.seed);
  read(from, "step", options.step);
  read(from, "mini_batch", options.mini_batch);
  return options;
}

py::dict run_policy_loss(const std::string& name, const py::dict& from, const py::dict& with) {
  algo::LossTokens tokens;
  read(from, "log_prob", tokens.log_prob);
  read(from, "entropy", tokens.entropy);
  read(from, "old_log_prob", tokens.old_log_prob);
  read(from, "ref_log_prob", tokens.ref_log_prob);
  read(from, "advantage", tokens.advantage);
  read(from, "mask", tokens.mask);
  read(from, "weight", tokens.weight);
  read(from, "offsets", tokens.offsets);
  read(from, "sequence", tokens.sequence);
  const algo::LossOptions options = loss_options(name, with);
  algo::LossScale scale = algo::loss_scale(tokens, get_or(with, "sequence_norm", 1.0));
  read(with, "num_tokens", scale.num_tokens);
  read(with, "num_sequences", scale.num_sequences);
  algo::LossResult result;
  {
    py::gil_scoped_release release;
    algo::check_loss_options(options);
    result = algo::actor_loss(tokens, scale, options);
  }
  py::dict out;
  const algo::LossMetrics& metrics = result.metrics;
  out["loss"] = metrics.loss;
  out["pg_loss"] = metrics.pg_loss;
  out["kl_loss"] = metrics.kl_loss;
  out["entropy_loss"] = metrics.entropy_loss;
  out["clipped_tokens"] = metrics.clipped_tokens;
  out["clipped_lower_tokens"] = metrics.clipped_lower_tokens;
  out["neg_log_ratio_sum"] = metrics.neg_log_ratio_sum;
  out["extra"] = to_dict(metrics.extra);
  out["grad_log_prob"] = result.grad_log_prob;
  if (result.grad_entropy.defined()) out["grad_entropy"] = result.grad_entropy;
  return out;
}

py::dict run_correction(const algo::PerToken& old_log_prob,
                        const algo::PerToken& rollout_log_prob,
                        const py::dict& with) {
  algo::CorrectionOptions options;
  read(with, "rollout_is", options.rollout_is);
  read(with, "rollout_is_threshold", options.rollout_is_threshold);
  read(with, "rollout_is_batch_normalize", options.rollout_is_batch_normalize);
  read(with, "rollout_rs", options.rollout_rs);
  read(with, "rollout_rs_threshold", options.rollout_rs_threshold);
  const algo::CorrectionResult result = algo::correction(old_log_prob, rollout_log_prob, options);
  py::dict out;
  out["weight"] = result.weight;
  std::vector<std::vector<int>> keep;
  for (const auto& row : result.keep) keep.emplace_back(row.begin(), row.end());
  out["keep"] = keep;
  out["metrics"] = to_dict(result.metrics);
  return out;
}

py::dict run_value_loss(const py::dict& from, const py::dict& with) {
  algo::ValueTokens tokens;
  read(from, "value", tokens.value);
  read(from, "old_value", tokens.old_value);
  read(from, "returns", tokens.returns);
  read(from, "mask", tokens.mask);
  read(from, "offsets", tokens.offsets);
  algo::ValueLossOptions options;
  read(with, "cliprange_value", options.cliprange_value);
  read(with, "loss_agg_mode", options.loss_agg_mode);
  algo::check_value_loss_options(options);
  algo::LossTokens shape;
  shape.mask = tokens.mask;
  shape.offsets = tokens.offsets;
  const algo::LossScale scale = algo::loss_scale(shape, get_or(with, "sequence_norm", 1.0));
  const algo::ValueLossResult result = algo::value_loss(tokens, scale, options);
  py::dict out;
  out["loss"] = result.loss;
  out["clipped_tokens"] = result.clipped_tokens;
  out["value_sum"] = result.value_sum;
  out["grad_value"] = result.grad_value;
  return out;
}

py::dict run_preference_loss(const py::dict& from, const py::dict& with) {
  algo::PreferenceTokens tokens;
  read(from, "log_prob", tokens.log_prob);
  read(from, "ref_log_prob", tokens.ref_log_prob);
  read(from, "offsets", tokens.offsets);
  read(from, "chosen", tokens.chosen);
  read(from, "rejected", tokens.rejected);
  algo::PreferenceOptions options;
  read(with, "loss_type", options.loss_type);
  read(with, "beta", options.beta);
  read(with, "label_smoothing", options.label_smoothing);
  read(with, "reference_free", options.reference_free);
  read(with, "sft_coef", options.sft_coef);
  algo::check_preference_options(options);
  const algo::PreferenceResult result =
      algo::preference_loss(tokens, static_cast<double>(tokens.chosen.size()), options);
  py::dict out;
  out["loss"] = result.loss;
  out["grad"] = result.grad;
  out["metrics"] = to_dict(result.metrics);
  return out;
}

py::dict run_reward_model_loss(const at::Tensor& chosen,
                               const at::Tensor& rejected,
                               double center_rewards_coefficient) {
  const algo::RewardModelResult result =
      algo::reward_model_loss(chosen,
                              rejected,
                              at::Tensor(),
                              static_cast<double>(chosen.numel()),
                              {.center_rewards_coefficient = center_rewards_coefficient});
  py::dict out;
  out["loss"] = result.loss;
  out["grad_chosen"] = result.grad_chosen;
  out["grad_rejected"] = result.grad_rejected;
  out["metrics"] = to_dict(result.metrics);
  return out;
}

py::dict run_reward_kl(const algo::PerToken& old_log_prob,
                       const algo::PerToken& ref_log_prob,
                       algo::PerToken token_reward,
                       const std::string& kl_penalty,
                       double beta) {
  const std::vector<uint8_t> valid(token_reward.size(), 1);
  const algo::RewardKl measured =
      algo::subtract_kl(old_log_prob, ref_log_prob, valid, kl_penalty, beta, token_reward);
  py::dict out;
  out["token_reward"] = token_reward;
  out["kl"] = measured.kl;
  return out;
}

}  // namespace

void bind_algo(py::module_& module) {
  module.def(
      "advantage_estimators",
      [] {
        py::dict out;
        for (const std::string& name : algo::advantages().names()) {
          const algo::Advantage& entry = algo::advantages().get(name);
          py::dict traits;
          traits["needs_value"] = entry.needs_value;
          traits["needs_greedy"] = entry.needs_greedy;
          traits["needs_sum_squares"] = entry.needs_sum_squares;
          traits["needs_components"] = entry.needs_components;
          traits["is_group_relative"] = entry.is_group_relative;
          out[py::str(name)] = traits;
        }
        return out;
      },
      "The built-in estimators and what each needs.");
  module.def(
      "policy_losses",
      [] {
        py::dict out;
        for (const std::string& name : algo::policy_losses().names()) {
          const algo::PolicyLoss& entry = algo::policy_losses().get(name);
          py::dict traits;
          traits["whole_mini_batch"] = entry.scope == algo::PolicyScope::kMiniBatch;
          traits["forced_aggregation"] = entry.forced_aggregation;
          traits["has_ratio"] = entry.has_ratio;
          out[py::str(name)] = traits;
        }
        return out;
      },
      "The built-in policy losses and what each needs.");
  module.def("advantages",
             &run_advantages,
             py::arg("name"),
             py::arg("input"),
             py::arg("options") = py::dict(),
             "Advantages and returns [S][n_i] of algorithm.adv_estimator=name.");
  module.def(
      "policy_loss",
      &run_policy_loss,
      py::arg("name"),
      py::arg("tokens"),
      py::arg("options") = py::dict(),
      "The actor loss on one mini-batch with policy_loss.loss_mode=name, and its gradients.");
  module.def("correction",
             &run_correction,
             py::arg("old_log_prob"),
             py::arg("rollout_log_prob"),
             py::arg("options") = py::dict(),
             "Weights, kept tokens and figures of algorithm.rollout_correction.");
  module.def("value_loss",
             &run_value_loss,
             py::arg("tokens"),
             py::arg("options") = py::dict(),
             "The critic's loss on one mini-batch and its gradient.");
  module.def("preference_loss",
             &run_preference_loss,
             py::arg("tokens"),
             py::arg("options") = py::dict(),
             "DPO or IPO on pairs, and the gradient per token.");
  module.def("reward_model_loss",
             &run_reward_model_loss,
             py::arg("chosen"),
             py::arg("rejected"),
             py::arg("center_rewards_coefficient") = 0.0,
             "The Bradley-Terry loss and its gradients.");
  module.def("reward_kl",
             &run_reward_kl,
             py::arg("old_log_prob"),
             py::arg("ref_log_prob"),
             py::arg("token_reward"),
             py::arg("kl_penalty"),
             py::arg("beta"),
             "Token rewards minus beta times the KL to the reference.");
}

}  // namespace banyan::bindings
