// Python functions as losses and advantages: set_user_loss, set_user_advantage. The core calls them
// from the training thread without the GIL; each call takes it, hands over 1-D tensors by name and
// converts what comes back. Choosing arguments by name and naming errors is the shell's part
// (python/banyan/algo_functions.py); the core checks shapes and numbers.
#include "banyan/algo/user_function.h"

#include <ATen/ops/tensor.h>

#include "callable.h"
#include "convert.h"

namespace banyan::bindings {
namespace {

py::object optional(const at::Tensor& tensor) {
  return tensor.defined() ? py::cast(tensor) : py::none();
}

py::dict loss_config(const algo::LossOptions& options, const std::string& mode) {
  py::dict out;
  out["loss_agg_mode"] = mode;
  out["clip_ratio_low"] = options.clip_ratio_low;
  out["clip_ratio_high"] = options.clip_ratio_high;
  out["clip_ratio_c"] = options.clip_ratio_c;
  out["entropy_coeff"] = options.entropy_coeff;
  out["kl_loss_coef"] = options.kl_loss_coef;
  out["step"] = options.step;
  out["mini_batch"] = options.mini_batch;
  return out;
}

algo::PolicyLossResult call_loss(const Callable& function,
                                 const algo::LossTokens& tokens,
                                 const at::Tensor& log_prob,
                                 const algo::LossOptions& options) {
  const py::gil_scoped_acquire acquire;
  py::dict arguments;
  arguments["log_prob"] = log_prob;
  arguments["old_log_prob"] = tokens.old_log_prob;
  arguments["advantages"] = tokens.advantage;
  arguments["response_mask"] = tokens.mask;
  arguments["weights"] = optional(tokens.weight);
  arguments["ref_log_prob"] = optional(tokens.ref_log_prob);
  arguments["entropy"] = optional(tokens.entropy);
  arguments["offsets"] = tokens.offsets;
  arguments["config"] = loss_config(options, algo::aggregation_mode(options));
  const auto [loss, metrics] =
      (*function)(arguments).cast<std::pair<at::Tensor, std::map<std::string, double>>>();
  algo::PolicyLossResult result;
  result.loss = loss;
  for (const auto& [name, value] : metrics) result.metrics[name] = algo::mean_of(value, 1.0);
  return result;
}

py::object tensors(const algo::PerToken& rows) {
  if (rows.empty()) return py::none();
  py::list out;
  for (const auto& row : rows) out.append(at::tensor(row, at::kDouble));
  return out;
}

py::dict advantage_config(const algo::AdvantageOptions& options) {
  py::dict out;
  out["norm_adv_by_std_in_grpo"] = options.norm_adv_by_std_in_grpo;
  out["gamma"] = options.gamma;
  out["lam"] = options.lam;
  return out;
}

algo::AdvantageResult call_advantage(const Callable& function,
                                     const algo::AdvantageInput& input,
                                     const algo::AdvantageOptions& options) {
  const py::gil_scoped_acquire acquire;
  py::dict arguments;
  arguments["token_level_rewards"] = tensors(input.token_reward);
  arguments["index"] = input.group;
  arguments["scores"] = input.score;
  arguments["values"] = tensors(input.value);
  arguments["old_log_probs"] = tensors(input.old_log_prob);
  arguments["weights"] = tensors(input.weight);
  arguments["components"] = input.components;
  arguments["config"] = advantage_config(options);
  auto [advantage, returns] =
      (*function)(arguments).cast<std::pair<algo::PerToken, algo::PerToken>>();
  return {std::move(advantage), std::move(returns)};
}

}  // namespace

void bind_user_function(py::module_& module) {
  module.def(
      "set_user_loss",
      [](const std::string& name, py::object function, bool applies_weight) {
        algo::set_user_loss(
            name,
            [held = hold(std::move(function))](const algo::LossTokens& tokens,
                                               const at::Tensor& log_prob,
                                               const algo::LossOptions& options) {
              return call_loss(held, tokens, log_prob, options);
            },
            applies_weight);
      },
      py::arg("name"),
      py::arg("function"),
      py::arg("applies_weight"),
      "Makes function(arguments: dict) -> (loss [U], metrics) the policy loss `name`.");
  module.def(
      "set_user_advantage",
      [](const std::string& name, py::object function) {
        algo::set_user_advantage(
            name,
            [held = hold(std::move(function))](const algo::AdvantageInput& input,
                                               const algo::AdvantageOptions& options) {
              return call_advantage(held, input, options);
            });
      },
      py::arg("name"),
      py::arg("function"),
      "Makes function(arguments: dict) -> (advantages, returns), lists of lists, the estimator "
      "`name`.");
}

}  // namespace banyan::bindings
