#include "banyan/train/advantage_stage.h"

#include "banyan/algo/resample.h"
#include "banyan/core/error.h"
#include "banyan/train/correction.h"

namespace banyan::train {
namespace {

// Place of each masked token in its response.
std::vector<int64_t> positions(const Trajectory& trajectory) {
  std::vector<int64_t> out;
  for (size_t t = 0; t < trajectory.response_mask.size(); ++t) {
    if (trajectory.response_mask[t] != 0) out.push_back(static_cast<int64_t>(t));
  }
  return out;
}

// Entry `name` of the scorer's mapping, for every valid trajectory.
std::vector<double> component(const Batch& batch, const std::string& name) {
  std::vector<double> out;
  for (int64_t i = 0; i < batch.size(); ++i) {
    const double* value = find_entry(batch.scores[i], name);
    BANYAN_CHECK(value != nullptr || !batch.valid(i),
                 "[algorithm.gdpo_reward_keys] wanted an entry '",
                 name,
                 "' in what the reward function returns for every response, got none for row ",
                 batch.trajectories[i].row);
    out.push_back(value != nullptr ? *value : 0.0);
  }
  return out;
}

algo::AdvantageInput advantage_input(const AlgorithmConfig& algorithm,
                                     const Batch& batch,
                                     algo::PerToken token_reward) {
  algo::AdvantageInput input;
  input.valid = batch.validity();
  for (int64_t i = 0; i < batch.size(); ++i) {
    input.group.push_back(batch.trajectories[i].row);
    input.score.push_back(batch.scores[i].value);
    input.position.push_back(positions(batch.trajectories[i]));
  }
  input.token_reward = std::move(token_reward);
  input.value = per_token(batch, batch.value);
  input.old_log_prob = per_token(batch, batch.old_log_prob);
  input.sum_squares = per_token(batch, batch.sum_squares);
  input.weight = per_token(batch, batch.weight);
  input.greedy_score = batch.greedy_score;
  const algo::Advantage estimator = algo::advantage(algorithm.adv_estimator);
  if ((estimator.needs_components || estimator.is_user) && algorithm.gdpo_reward_keys) {
    for (const std::string& name : *algorithm.gdpo_reward_keys) {
      input.components[name] = component(batch, name);
    }
  }
  return input;
}

}  // namespace

algo::AdvantageOptions advantage_options(const AlgorithmConfig& algorithm) {
  algo::AdvantageOptions options;
  options.norm_adv_by_std_in_grpo = algorithm.norm_adv_by_std_in_grpo;
  options.gamma = algorithm.gamma;
  options.lam = algorithm.lam;
  options.gdpo_reward_keys = algorithm.gdpo_reward_keys.value_or(std::vector<std::string>{});
  options.gdpo_reward_weights = algorithm.gdpo_reward_weights.value_or(std::vector<double>{});
  return options;
}

algo::KlController kl_controller(const KlControlConfig& config) {
  return algo::KlController(config.type, config.kl_coef, config.target_kl, config.horizon);
}

AdvantageStats set_advantages(const Config& config,
                              int64_t step,
                              algo::KlController* controller,
                              Batch& batch) {
  const AlgorithmConfig& algorithm = config.algorithm;
  AdvantageStats stats;
  std::vector<double> score;
  std::vector<int64_t> num_tokens;
  for (int64_t i = 0; i < batch.size(); ++i) {
    score.push_back(batch.scores[i].value);
    num_tokens.push_back(batch.num_tokens(i));
  }
  algo::PerToken token_reward = algo::token_rewards(score, num_tokens);
  if (controller != nullptr) {
    stats.reward_kl_coef = controller->coef();
    stats.reward_kl = algo::subtract_kl(per_token(batch, batch.old_log_prob),
                                        per_token(batch, batch.ref_log_prob),
                                        batch.validity(),
                                        algorithm.kl_penalty,
                                        controller->coef(),
                                        token_reward);
    controller->update(stats.reward_kl);
  }
  batch.token_reward = token_lists(token_reward);

  const algo::CorrectionOptions correction = correction_options(algorithm.rollout_correction);
  if (algo::corrects(correction) && !algorithm.rollout_correction.bypass_mode) {
    stats.correction = correct_batch(correction, batch);
  }

  const algo::AdvantageResult result =
      algo::compute_advantages(algorithm.adv_estimator,
                               advantage_input(algorithm, batch, std::move(token_reward)),
                               advantage_options(algorithm));
  batch.advantage = token_lists(result.advantage);
  batch.returns = token_lists(result.returns);

  if (algorithm.use_pf_ppo) {
    batch.order = algo::resample(score,
                                 batch.validity(),
                                 {.reweight_method = algorithm.pf_ppo.reweight_method,
                                  .weight_pow = algorithm.pf_ppo.weight_pow},
                                 config.actor.data_loader_seed,
                                 static_cast<uint64_t>(step));
  }
  return stats;
}

}  // namespace banyan::train
