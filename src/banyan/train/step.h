// One training step, rollout to update. Read step.cpp: it is the whole order of things on one page.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/core/host.h"
#include "banyan/models/causal_lm.h"
#include "banyan/optim/adamw.h"
#include "banyan/optim/schedule.h"
#include "banyan/parallel/groups.h"
#include "banyan/train/advantage_stage.h"
#include "banyan/train/critic.h"
#include "banyan/train/layout.h"
#include "banyan/train/sampler.h"
#include "banyan/train/update.h"
#include "banyan/train/verify.h"

namespace banyan::train {

// Seconds per stage, named as verl's timing_s/*.
struct StageSeconds {
  double gen = 0.0;               // on ranks that only generate: beside the stages below
  double rollout_idle = 0.0;      // that those waited for orders and weights
  double wait_for_rollout = 0.0;  // that the ranks that train waited for the batch
  double reward = 0.0;            // waiting for scores after the last trajectory ended
  double old_log_prob = 0.0;
  double ref = 0.0;
  double values = 0.0;
  double adv = 0.0;
  double update_critic = 0.0;
  double update_actor = 0.0;
  double step = 0.0;
};

// What a step works with; everything is borrowed from the trainer.
struct StepContext {
  const Config& config;
  Host& host;
  Sampler& sampler;
  models::CausalLM& actor;
  optim::AdamW& optimizer;
  optim::ScheduleOptions schedule;
  models::CausalLM* reference;        // null unless KL in the reward or in the loss needs it
  Critic* critic;                     // null without one
  algo::KlController* kl_controller;  // null without KL in the reward
  const trie::CostModel& cost;
  SharingObserver* observer;  // watches the passes; null: nobody
  VerifySchedule verify;
  parallel::Groups* groups = nullptr;               // null: one process
  std::map<std::string, int64_t> sent_before = {};  // by them, when the step began
  int64_t num_updates = 0;                          // of this process, for `verify`
  bool sharing_failed = false;  // verify found a difference: nothing is shared any more
};

struct StepResult {
  bool end_of_data = false;  // the host had no full batch: nothing was done
  std::string refused;       // why the batch cannot be learned from; the weights are untouched then
  RolloutResult rollout;     // trajectories and scores moved into `batch`
  FilterStats filter;
  OverSampleStats over_sample;
  Batch batch;
  bool share = true;  // whether the passes of this step share prefixes
  AdvantageStats advantage;
  std::vector<CriticUpdate> critic_updates;
  double critic_lr = 0.0;
  std::vector<UpdateResult> updates;    // none while the critic warms up
  std::vector<MiniBatch> mini_batches;  // of the actor, one per update
  double lr = 0.0;
  StageSeconds seconds;
  int64_t state_bytes = 0;        // resident when the update began, gradients and moments included
  int64_t update_peak_bytes = 0;  // highest resident bytes during the updates
  int64_t num_processes = 1;      // of the run; both figures above are their highest
  int64_t num_ranks = 1;          // data-parallel ranks
  std::map<std::string, int64_t> sent_bytes;  // from this rank, by "group/operation"
};

// `step` counts from 1. A batch with more failed scores than banyan.reward.max_failed_frac allows,
// or one that the group filter cannot fill, is refused: the result says why and the weights are
// untouched.
StepResult run_step(StepContext& context, int64_t step);

}  // namespace banyan::train
