// The estimator by its name, the checks of its options, and the checks around a call of it.
#include <cmath>

#include "banyan/algo/advantage.h"
#include "banyan/algo/user_function.h"

namespace banyan::algo {
namespace {

void check_unit(const char* key, double value) {
  BANYAN_CHECK(std::isfinite(value) && value >= 0.0 && value <= 1.0,
               "[algorithm.",
               key,
               "] wanted a number in [0, 1], got ",
               value);
}

void check_gdpo(const AdvantageOptions& options) {
  BANYAN_CHECK(
      !options.gdpo_reward_keys.empty(),
      "[algorithm.gdpo_reward_keys] wanted the names of the scorer's entries to combine, got "
      "none");
  const size_t wanted = options.gdpo_reward_keys.size();
  const size_t got = options.gdpo_reward_weights.size();
  BANYAN_CHECK(got == 0 || got == wanted,
               "[algorithm.gdpo_reward_weights] wanted one per name of gdpo_reward_keys (",
               wanted,
               "), got ",
               got);
  for (const double weight : options.gdpo_reward_weights) {
    BANYAN_CHECK(std::isfinite(weight),
                 "[algorithm.gdpo_reward_weights] wanted finite numbers, got ",
                 weight);
  }
}

// One number per token of `like`, in every row that takes part (others may be empty).
template <typename Row>
void check_shape(const char* what,
                 const std::vector<Row>& values,
                 const PerToken& like,
                 const std::vector<uint8_t>& valid) {
  BANYAN_ASSERT(values.size() == like.size(), what, ": ", values.size(), " rows, ", like.size());
  for (size_t row = 0; row < like.size(); ++row) {
    BANYAN_ASSERT(!valid[row] || values[row].size() == like[row].size(),
                  what,
                  " of row ",
                  row,
                  ": ",
                  values[row].size(),
                  " tokens, wanted ",
                  like[row].size());
  }
}

void check_input(const Advantage& estimator,
                 const AdvantageInput& input,
                 const AdvantageOptions& options) {
  const size_t size = input.token_reward.size();
  BANYAN_ASSERT(input.group.size() == size && input.valid.size() == size &&
                    (input.trajectory.empty() || input.trajectory.size() == size),
                "advantages: ",
                size,
                " rows of rewards, ",
                input.group.size(),
                " groups, ",
                input.valid.size(),
                " flags");
  const auto check = [&](const char* what, const auto& values) {
    check_shape(what, values, input.token_reward, input.valid);
  };
  if (estimator.needs_value) check("values", input.value);
  if (estimator.needs_greedy) {
    BANYAN_ASSERT(input.greedy_score.size() == size, "advantages: no greedy scores");
  }
  if (estimator.needs_sum_squares) {
    check("old_log_prob", input.old_log_prob);
    check("sum_squares", input.sum_squares);
    if (!input.weight.empty()) check("weight", input.weight);
    if (!input.position.empty()) check("position", input.position);
  }
  if (!estimator.needs_components) return;
  for (const std::string& key : options.gdpo_reward_keys) {
    const auto found = input.components.find(key);
    BANYAN_CHECK(found != input.components.end() && found->second.size() == size,
                 "[algorithm.gdpo_reward_keys] wanted an entry '",
                 key,
                 "' in what the reward function returns for every response, got none");
  }
}

}  // namespace

Advantage advantage(const std::string& name) {
  if (!is_user_function(name)) return advantages().get(name);
  Advantage entry;
  entry.function = user_advantage(name);
  entry.is_user = true;
  return entry;
}

void check_advantage_options(const std::string& name,
                             const AdvantageOptions& options,
                             int64_t samples_per_prompt) {
  const Advantage estimator = advantage(name);
  check_unit("gamma", options.gamma);
  check_unit("lam", options.lam);
  if (estimator.needs_components) check_gdpo(options);
  BANYAN_CHECK(!estimator.is_group_relative || samples_per_prompt >= 2,
               "[rollout.n] wanted >= 2 with algorithm.adv_estimator=",
               name,
               ", got ",
               samples_per_prompt,
               ": the advantage of a group of one is always 0");
}

AdvantageResult compute_advantages(const std::string& name,
                                   const AdvantageInput& input,
                                   const AdvantageOptions& options) {
  const Advantage estimator = advantage(name);
  check_input(estimator, input, options);
  AdvantageResult result = estimator.function(input, options);
  const std::vector<uint8_t> all(input.token_reward.size(), 1);
  check_shape("advantages", result.advantage, input.token_reward, all);
  check_shape("returns", result.returns, input.token_reward, all);
  return result;
}

}  // namespace banyan::algo
