#include "banyan/train/step.h"

#include "banyan/core/error.h"
#include "banyan/core/memory.h"
#include "banyan/train/clock.h"
#include "banyan/train/walk.h"

namespace banyan::train {
namespace {

std::vector<int64_t> rows_of(const std::vector<PromptRow>& prompts) {
  std::vector<int64_t> rows;
  for (const PromptRow& prompt : prompts) rows.push_back(prompt.row);
  return rows;
}

// Why too many scores failed to learn from this batch, or "".
std::string too_many_failed(const Config& config, const std::vector<Score>& scores) {
  int64_t failed = 0;
  std::string reason;
  for (const Score& score : scores) {
    if (!score.failed) continue;
    ++failed;
    reason = score.reason;
  }
  const double allowed = config.max_failed_frac * static_cast<double>(scores.size());
  if (static_cast<double>(failed) <= allowed) return "";
  return detail::concat("[reward] ",
                        failed,
                        " of ",
                        scores.size(),
                        " scores failed, more than banyan.reward.max_failed_frac=",
                        config.max_failed_frac,
                        " allows; the last reason: ",
                        reason);
}

// Log-probabilities of every valid trajectory under `model`, through one trie of the whole batch.
std::vector<at::Tensor> score_batch(const Config& config,
                                    const Batch& batch,
                                    models::CausalLM& model) {
  std::vector<int64_t> which;
  for (int64_t i = 0; i < batch.size(); ++i) {
    if (batch.valid(i)) which.push_back(i);
  }
  trie::PlanOptions options = plan_options(config);
  options.for_backward = false;
  const trie::Plan plan = trie::plan(samples_of(batch, which), options);
  SampleScores scores =
      score_samples(model, plan, {.temperature = config.rollout.train.temperature});
  std::vector<at::Tensor> out(batch.size());
  for (size_t k = 0; k < which.size(); ++k) out[which[k]] = std::move(scores.value[k]);
  return out;
}

// With one update per batch the policy of the loss is the policy that generated, so l_old is l
// detached and the pass is skipped (T31).
bool needs_old_log_prob(const Config& config, const Batch& batch, int64_t step) {
  return config.force_old_log_prob || config.actor.ppo_epochs > 1 ||
         mini_batches(config, batch, step, 0).size() > 1;
}

}  // namespace

StepResult run_step(StepContext& context, int64_t step) {
  const Config& config = context.config;
  StepResult out;
  Clock whole, stage;

  // 1. Prompts to scored trajectories.
  const std::vector<PromptRow> prompts = context.host.next_prompts(config.train_batch_size);
  if (static_cast<int64_t>(prompts.size()) < config.train_batch_size) {
    out.end_of_data = true;
    return out;
  }
  out.rollout =
      run_rollout(config, prompts, step, /*validation=*/false, context.engine, context.host);
  out.refused = too_many_failed(config, out.rollout.scores);
  if (!out.refused.empty()) return out;
  out.batch = make_batch(std::move(out.rollout.trajectories), out.rollout.scores, rows_of(prompts));
  out.seconds.gen = out.rollout.generate_seconds;
  out.seconds.reward = out.rollout.wait_seconds;
  stage.lap();

  // 2. Log-probabilities before the update, and of the reference.
  if (needs_old_log_prob(config, out.batch, step)) {
    out.batch.old_log_prob = score_batch(config, out.batch, context.actor);
  }
  out.seconds.old_log_prob = stage.lap();
  if (context.reference != nullptr) {
    out.batch.ref_log_prob = score_batch(config, out.batch, *context.reference);
  }
  out.seconds.ref = stage.lap();

  // 3. Advantages.
  set_advantages(config.algorithm, out.batch);
  out.seconds.adv = stage.lap();

  // 4. Updates: epochs of mini-batches, one optimizer step each. update() re-packs the weights,
  //    which is the whole hand-over to the rollout: it reads the same packed form.
  out.lr = optim::learning_rate(context.schedule, step - 1);
  context.actor.params().ensure_grads();
  release_freed_memory();  // what sampling left is no part of the state
  out.state_bytes = resident_bytes();
  reset_peak_resident();
  for (int64_t epoch = 0; epoch < config.actor.ppo_epochs; ++epoch) {
    for (const auto& mini_batch : mini_batches(config, out.batch, step, epoch)) {
      out.updates.push_back(
          update(config, out.batch, mini_batch, out.lr, context.actor, context.optimizer));
    }
  }
  out.update_peak_bytes = peak_resident_bytes();
  out.seconds.update_actor = stage.lap();
  out.seconds.step = whole.lap();
  return out;
}

optim::ScheduleOptions schedule_options(const Config& config, int64_t total_steps) {
  return optim::schedule_from(config.actor.optim, total_steps);
}

}  // namespace banyan::train
