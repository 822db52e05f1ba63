#include "banyan/train/checks.h"

#include "banyan/algo/resample.h"
#include "banyan/core/error.h"
#include "banyan/optim/schedule.h"
#include "banyan/train/advantage_stage.h"
#include "banyan/train/correction.h"
#include "banyan/train/critic.h"
#include "banyan/train/memory_keys.h"
#include "banyan/train/offload.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/rollout_dump.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/trainer_mode.h"
#include "banyan/train/update.h"
#include "banyan/train/verify.h"

namespace banyan::train {
namespace {

void check_critic(const Config& config) {
  const std::string& estimator = config.algorithm.adv_estimator;
  BANYAN_CHECK(wants_critic(config) || !algo::advantage(estimator).needs_value,
               "[config] critic.enable: wanted true or null with algorithm.adv_estimator=",
               estimator,
               ", which needs values, got false");
  if (wants_critic(config)) check_critic_config(config);
  BANYAN_CHECK(config.trainer.critic_warmup == 0 || wants_critic(config),
               "[config] trainer.critic_warmup: wanted 0 without a critic, got ",
               config.trainer.critic_warmup,
               ": those steps would train nothing");
}

void check_rewards(const Config& config) {
  const AlgorithmConfig& algorithm = config.algorithm;
  algo::check_kl_penalty(algorithm.kl_penalty);
  kl_controller(algorithm.kl_ctrl);
  algo::check_correction_options(correction_options(algorithm.rollout_correction));
  algo::check_resample_options({.reweight_method = algorithm.pf_ppo.reweight_method,
                                .weight_pow = algorithm.pf_ppo.weight_pow});
  BANYAN_CHECK(!algorithm.use_pf_ppo || algorithm.adv_estimator == "gae",
               "[config] algorithm.use_pf_ppo: wanted algorithm.adv_estimator=gae with it, got ",
               algorithm.adv_estimator);
  BANYAN_CHECK(!config.reward_model.enable || config.reward_model.model_path,
               "[config] reward.reward_model.model_path: wanted a directory with "
               "reward.reward_model.enable=true, got null");
}

std::vector<std::string> open_choices(const Config& config) {
  std::vector<std::string> lines;
  const algo::LossOptions loss = loss_options(config);
  const std::string forced = algo::policy_loss(loss.loss_mode).forced_aggregation;
  if (!forced.empty() && loss.loss_agg_mode.empty()) {  // T12
    lines.push_back("policy_loss.loss_mode=" + loss.loss_mode + ": loss_agg_mode is " + forced +
                    ", part of this loss");
  }
  if (wants_folder(actor_offload(config)) || wants_folder(reference_offload(config)) ||
      (wants_critic(config) && wants_folder(critic_offload(config)))) {
    lines.push_back(kWantsFolder);
  }
  if (config.algorithm.use_kl_in_reward && config.actor.use_kl_loss) {
    lines.push_back("KL to the reference counts twice: in the reward and in the loss");
  }
  return lines;
}

// T38; an unknown schedule throws here.
void note_first_rate(const char* who,
                     const OptimConfig& optim,
                     int64_t steps,
                     std::vector<std::string>& lines) {
  if (optim::learning_rate(optim::schedule_from(optim, steps), 0) != 0.0) return;
  lines.push_back(std::string("the ") + who +
                  "'s learning rate of the first step is 0: it changes nothing (lr, "
                  "lr_warmup_steps)");
}

}  // namespace

int64_t total_steps(const Config& config) {
  if (config.trainer.total_training_steps) return *config.trainer.total_training_steps;
  return config.trainer.total_epochs * (config.num_train_rows / config.train_batch_size);
}

std::vector<std::string> check_config(const Config& config) {
  verify_schedule(config.sharing.verify);
  check_sharding(config);
  check_parallel(config);
  check_rollout_dump(config);
  actor_recompute(config);
  router_in_double(config);
  if (wants_critic(config)) critic_recompute(config);
  algo::check_loss_options(loss_options(config));
  algo::check_advantage_options(
      config.algorithm.adv_estimator, advantage_options(config.algorithm), config.rollout.train.n);
  check_critic(config);
  check_rewards(config);
  std::vector<std::string> lines = open_choices(config);
  check_trainer_mode(config, lines);
  note_first_rate("actor", config.actor.optim, total_steps(config), lines);
  if (wants_critic(config)) {
    note_first_rate("critic", config.critic.optim, total_steps(config), lines);
  }
  return lines;
}

}  // namespace banyan::train
