// One training step, rollout to update. Read step.cpp: it is the whole order of things on one page.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/core/host.h"
#include "banyan/models/causal_lm.h"
#include "banyan/optim/adamw.h"
#include "banyan/optim/schedule.h"
#include "banyan/rollout/engine.h"
#include "banyan/train/batch.h"
#include "banyan/train/rollout_stage.h"
#include "banyan/train/update.h"

namespace banyan::train {

// Seconds per stage, named as verl's timing_s/*.
struct StageSeconds {
  double gen = 0.0;
  double reward = 0.0;  // waiting for scores after the last trajectory ended
  double old_log_prob = 0.0;
  double ref = 0.0;
  double adv = 0.0;
  double update_actor = 0.0;
  double step = 0.0;
};

// What a step works with; everything is borrowed from the trainer.
struct StepContext {
  const Config& config;
  Host& host;
  models::CausalLM& actor;
  models::CausalLM* reference;  // null without use_kl_loss
  rollout::Engine& engine;
  optim::AdamW& optimizer;
  optim::ScheduleOptions schedule;
};

struct StepResult {
  bool end_of_data = false;  // the host had no full batch: nothing was done
  std::string refused;       // why the batch cannot be learned from; the weights are untouched then
  RolloutResult rollout;     // trajectories and scores moved into `batch`
  Batch batch;
  std::vector<UpdateResult> updates;
  double lr = 0.0;
  StageSeconds seconds;
  int64_t state_bytes = 0;        // resident when the update began, gradients and moments included
  int64_t update_peak_bytes = 0;  // highest resident bytes during the update
};

// `step` counts from 1. A batch with more failed scores than banyan.reward.max_failed_frac allows
// is refused: the result says why and the weights are untouched.
StepResult run_step(StepContext& context, int64_t step);

// The learning-rate schedule of a run of `total_steps` steps.
optim::ScheduleOptions schedule_options(const Config& config, int64_t total_steps);

}  // namespace banyan::train
