#include "banyan/train/trainer.h"

#include <algorithm>
#include <filesystem>
#include <memory>

#include "banyan/checkpoint/checkpoint.h"
#include "banyan/core/error.h"
#include "banyan/core/memory.h"
#include "banyan/models/causal_lm.h"
#include "banyan/train/clock.h"
#include "banyan/train/metrics.h"
#include "banyan/train/step.h"

namespace banyan::train {
namespace {

ComputeOptions compute_options(const Config& config) {
  return banyan::compute_options(config.rollout.dtype, config.trainer.device, config.kernels);
}

int64_t total_steps(const Config& config) {
  if (config.trainer.total_training_steps) return *config.trainer.total_training_steps;
  return config.trainer.total_epochs * (config.num_train_rows / config.train_batch_size);
}

bool due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

class Run {
 public:
  Run(const Config& config, Host& host) : config_(config), host_(host) {
    keep_freed_memory();
    check_update_config(config);
    num_steps_ = total_steps(config);
    schedule_ = schedule_options(config, num_steps_);
    // An unknown schedule fails here, before a model loads.
    if (optim::learning_rate(schedule_, 0) == 0.0) {  // T38
      host_.say(
          "the learning rate of the first step is 0: it changes nothing (lr, lr_warmup_steps)");
    }
    actor_ = models::load_model(config.model.path, {compute_options(config), true});
    if (config.actor.use_kl_loss) {
      reference_ = models::load_model(config.ref_model_path.value_or(config.model.path),
                                      {compute_options(config), false});
    }
    const OptimConfig& optim = config.actor.optim;
    optimizer_ =
        std::make_unique<optim::AdamW>(actor_->params(),
                                       optim::AdamWOptions{.beta1 = optim.betas[0],
                                                           .beta2 = optim.betas[1],
                                                           .eps = 1e-8,
                                                           .weight_decay = optim.weight_decay});
    resume();
    engine_ = std::make_unique<rollout::Engine>(*actor_, engine_options(config));
  }

  TrainSummary run() {
    summary_.first_step = step_;
    summary_.last_step = step_;
    if (config_.trainer.val_before_train && step_ == 0) log_validation();
    StepContext context{
        config_, host_, *actor_, reference_.get(), *engine_, *optimizer_, schedule_};
    while (step_ < num_steps_) {
      if (host_.should_stop()) {
        summary_.stopped_early = true;
        break;
      }
      const std::string position = host_.save_state();
      StepResult result = run_step(context, step_ + 1);
      if (!result.refused.empty()) {
        // The steps done so far are kept, and a resumed run draws this batch again.
        if (step_ > summary_.first_step && saved_step_ != step_) save(position);
        BANYAN_CHECK(false, result.refused);
      }
      if (result.end_of_data) {
        host_.say("the data ended before the last step");
        summary_.stopped_early = true;
        break;
      }
      ++step_;
      finish(result);
    }
    summary_.last_step = step_;
    if (step_ > summary_.first_step && saved_step_ != step_) save(host_.save_state());
    return summary_;
  }

 private:
  void resume() {
    const TrainerConfig& trainer = config_.trainer;
    if (trainer.resume_mode == "disable") return;
    std::optional<checkpoint::Found> found;
    if (trainer.resume_mode == "resume_path") {
      BANYAN_CHECK(trainer.resume_from_path,
                   "[config] trainer.resume_from_path: wanted a checkpoint with "
                   "resume_mode=resume_path, got null");
      found = checkpoint::Found{*trainer.resume_from_path, {}};
    } else {
      BANYAN_CHECK(trainer.resume_mode == "auto",
                   "[config] trainer.resume_mode: wanted auto, disable or resume_path, got '",
                   trainer.resume_mode,
                   "'");
      found = checkpoint::find_latest(trainer.default_local_dir);
    }
    if (!found) return;
    for (const std::string& reason : found->rejected) host_.say("checkpoint not used: " + reason);
    const checkpoint::TrainerState state = checkpoint::load(found->path, *actor_, *optimizer_);
    step_ = state.global_step;
    saved_step_ = step_;
    skipped_in_a_row_ = state.skipped_in_a_row;
    summary_.checkpoint = found->path;
    host_.load_state(state.extra);
    host_.say("resumed from " + found->path + " after step " + std::to_string(step_));
  }

  void finish(StepResult& result) {
    Metrics metrics = step_metrics(config_, result, step_);
    for (const UpdateResult& update : result.updates) {
      for (const std::string& warning : update.warnings) host_.say(warning);
      skipped_in_a_row_ = update.skipped ? skipped_in_a_row_ + 1 : 0;
    }
    host_.on_samples(step_, /*validation=*/false, result.batch.trajectories, result.batch.scores);
    const bool last = step_ == num_steps_;
    Clock clock;
    if (due(config_.trainer.save_freq, step_)) {
      save(host_.save_state());
      metrics["timing_s/save_checkpoint"] = clock.lap();
    }
    if (config_.trainer.test_freq > 0 && (last || due(config_.trainer.test_freq, step_))) {
      clock.lap();
      metrics.merge(validate());
      metrics["timing_s/testing"] = clock.lap();
    }
    host_.log(step_, metrics);
    BANYAN_CHECK(skipped_in_a_row_ < config_.max_nonfinite_steps,
                 "[update] ",
                 skipped_in_a_row_,
                 " updates in a row had a non-finite loss or gradient norm "
                 "(banyan.max_nonfinite_steps=",
                 config_.max_nonfinite_steps,
                 "); the weights are those of the last finite one");
  }

  Metrics validate() {
    RolloutResult rollout = run_rollout(
        config_, host_.validation_prompts(), step_, /*validation=*/true, *engine_, host_);
    host_.on_samples(step_, /*validation=*/true, rollout.trajectories, rollout.scores);
    return host_.validation_metrics(rollout.trajectories, rollout.scores);
  }

  void log_validation() {
    Clock clock;
    Metrics metrics = validate();
    metrics["timing_s/testing"] = clock.lap();
    host_.log(step_, metrics);
  }

  // `position` is the host's place in the data after step step_.
  void save(const std::string& position) {
    checkpoint::TrainerState state;
    state.global_step = step_;
    state.skipped_in_a_row = skipped_in_a_row_;
    state.extra = position;
    checkpoint::save(config_.trainer.default_local_dir,
                     *actor_,
                     *optimizer_,
                     state,
                     config_.model.path,
                     config_.trainer.max_actor_ckpt_to_keep.value_or(0));
    saved_step_ = step_;
    summary_.checkpoint = (std::filesystem::path(config_.trainer.default_local_dir) /
                           ("global_step_" + std::to_string(step_)))
                              .string();
  }

  const Config& config_;
  Host& host_;
  int64_t num_steps_ = 0;
  int64_t step_ = 0;
  int64_t saved_step_ = -1;
  int64_t skipped_in_a_row_ = 0;
  optim::ScheduleOptions schedule_;
  std::unique_ptr<models::CausalLM> actor_;
  std::unique_ptr<models::CausalLM> reference_;
  std::unique_ptr<optim::AdamW> optimizer_;
  std::unique_ptr<rollout::Engine> engine_;
  TrainSummary summary_;
};

}  // namespace

TrainSummary train(const Config& config, Host& host) { return Run(config, host).run(); }

}  // namespace banyan::train
