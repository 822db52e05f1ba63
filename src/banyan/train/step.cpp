#include "banyan/train/step.h"

#include "banyan/core/memory.h"
#include "banyan/core/profile.h"
#include "banyan/feature/running.h"
#include "banyan/train/clock.h"
#include "banyan/train/correction.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/run_support.h"
#include "banyan/train/spread.h"
#include "banyan/train/trainer_mode.h"

namespace banyan::train {
namespace {

bool needs_sum_squares(const Config& config) {
  return config.actor.calculate_sum_pi_squared ||
         algo::advantage(config.algorithm.adv_estimator).needs_sum_squares;
}

// With one update per batch the policy of the loss is the policy that generated, so l_old is l
// detached and the pass is skipped unless something else reads it (T31).
bool needs_old_log_prob(const Config& config, size_t num_updates) {
  const AlgorithmConfig& algorithm = config.algorithm;
  return config.force_old_log_prob || num_updates > 1 || algorithm.use_kl_in_reward ||
         needs_sum_squares(config) ||
         algo::corrects(correction_options(algorithm.rollout_correction));
}

// Log-probabilities and entropies of the policy before the update.
void set_old_log_prob(const Config& config,
                      const trie::PlanOptions& plan,
                      size_t num_updates,
                      models::CausalLM& actor,
                      const Layout& layout,
                      Batch& batch) {
  const bool bypass = config.algorithm.rollout_correction.bypass_mode;
  if (bypass) batch.old_log_prob = rollout_log_probs(batch);
  if (bypass ? !needs_sum_squares(config) : !needs_old_log_prob(config, num_updates)) return;
  BatchScores scores = score_batch_over(batch,
                                        actor,
                                        plan,
                                        {.temperature = config.rollout.train.temperature,
                                         .with_entropy = true,
                                         .with_sum_squares = needs_sum_squares(config)},
                                        "old_log_prob",
                                        layout);
  if (!bypass) batch.old_log_prob = std::move(scores.value);
  batch.old_entropy = std::move(scores.entropy);
  batch.sum_squares = std::move(scores.sum_squares);
}

}  // namespace

StepResult run_step(StepContext& context, int64_t step) {
  const profile::Scope timed("step");
  const feature::Running running;
  const Config& config = context.config;
  StepResult out;
  Clock whole, stage;

  // 1. Prompts to scored trajectories, and the one decision on how all passes lay them out.
  SampledBatch sampled = context.sampler.batch(step);
  out.end_of_data = sampled.end_of_data;
  out.refused = std::move(sampled.refused);
  if (out.end_of_data || !out.refused.empty()) return out;
  out.batch = std::move(sampled.batch);
  out.rollout = std::move(sampled.rollout);
  out.filter = sampled.filter;
  out.over_sample = sampled.over_sample;
  out.seconds.gen = out.rollout.generate_seconds;
  out.seconds.reward = out.rollout.wait_seconds;
  out.seconds.rollout_idle = sampled.idle_seconds;
  out.seconds.wait_for_rollout = sampled.waited_seconds;
  stage.lap();
  Batch& batch = out.batch;
  const BlockLimits limits = block_limits(config.actor);
  out.share = decide_sharing(config.sharing,
                             config.sharing_margin,
                             context.cost,
                             limits,
                             samples_of(batch, valid_of(batch)));
  out.share = out.share && !context.sharing_failed;
  if (context.groups != nullptr) {  // free memory and with it limits may differ
    out.share = context.groups->world.broadcast_bytes(out.share ? "1" : "0", 0) == "1";
  }
  Layout layout{out.share, context.cost, context.observer};
  if (context.groups != nullptr) set_ranks(config, *context.groups, layout);
  const trie::PlanOptions scoring =
      plan_options(config.sharing, layout, limits, /*for_backward=*/false);

  // 2. Log-probabilities before the update, and of the reference; values of the critic.
  const size_t num_updates = mini_batches(actor_mini_batches(config), batch, step).size();
  set_old_log_prob(config, scoring, num_updates, context.actor, layout, batch);
  out.seconds.old_log_prob = stage.lap();
  if (context.reference != nullptr) {
    const HeadSpec head{.temperature = config.rollout.train.temperature};
    batch.ref_log_prob =
        score_batch_over(batch, *context.reference, scoring, head, "ref_log_prob", layout).value;
    context.reference->params().rest();
  }
  out.seconds.ref = stage.lap();
  if (context.critic != nullptr) batch.value = context.critic->values(batch, layout);
  out.seconds.values = stage.lap();

  // 3. Token rewards, KL in the reward, rollout correction, advantages.
  out.advantage = set_advantages(config, step, context.kl_controller, batch);
  out.seconds.adv = stage.lap();

  // 4. Updates: epochs of mini-batches, one optimizer step each; the critic first.
  context.actor.params().ensure_grads();
  release_freed_memory();  // what sampling left is no part of the state
  out.state_bytes = resident_bytes();
  reset_peak_resident();
  if (context.critic != nullptr) {
    out.critic_lr = context.critic->learning_rate(step);
    out.critic_updates = context.critic->update(batch, layout, step);
  }
  out.seconds.update_critic = stage.lap();
  out.lr = optim::learning_rate(context.schedule, step - 1);
  if (step >= config.trainer.critic_warmup) {
    out.mini_batches = mini_batches(actor_mini_batches(config), batch, step);
  }
  for (const MiniBatch& mini_batch : out.mini_batches) {
    out.updates.push_back(update(config,
                                 batch,
                                 mini_batch,
                                 layout,
                                 context.verify.due(context.num_updates++),
                                 out.lr,
                                 context.actor,
                                 context.optimizer));
    context.sharing_failed = context.sharing_failed || out.updates.back().sharing_failed;
    layout.share = layout.share && !context.sharing_failed;
  }
  out.update_peak_bytes = peak_resident_bytes();
  if (context.groups != nullptr) {
    out.num_processes = context.groups->world.size() + num_rollout_ranks(config);
    out.num_ranks = context.groups->data.size();
    out.sent_bytes = parallel::sent_bytes_since(context.sent_before, *context.groups);
    out.state_bytes = most(out.state_bytes, context.groups->world);
    out.update_peak_bytes = most(out.update_peak_bytes, context.groups->world);
  }
  out.seconds.update_actor = stage.lap();
  out.seconds.step = whole.lap();
  return out;
}

}  // namespace banyan::train
