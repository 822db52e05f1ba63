// Prompts to scored trajectories: the engine generates, each trajectory is handed to the scorer as
// it ends. With a reward model the scorer waits for the model's numbers, which come from one pass
// over all trajectories.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/core/host.h"
#include "banyan/rollout/engine.h"
#include "banyan/train/reward_model.h"

namespace banyan::train {

struct RolloutResult {
  std::vector<Trajectory> trajectories;  // in the order in which they ended
  std::vector<Score> scores;             // in the order in which they came
  rollout::GenerateStats stats;
  double generate_seconds = 0.0;
  double wait_seconds = 0.0;  // for scores, after the last trajectory ended
};

// What samples, and for what.
enum class RolloutKind : uint8_t {
  kTrain,       // rollout.n responses a prompt
  kValidation,  // val_kwargs; the noise does not depend on the step
  kGreedy,      // one response a prompt, the likeliest tokens, with index rollout.n: a baseline
};

struct Generation {
  const Config& config;
  rollout::Generator& generator;
  RewardModel* reward_model;  // null: the host scores alone
  Host& host;
};

rollout::EngineOptions engine_options(const Config& config);

// `step` keys the noise.
RolloutResult run_rollout(const Generation& with,
                          const std::vector<PromptRow>& rows,
                          RolloutKind kind,
                          int64_t step);

// Adds the trajectories, scores and figures of `from`.
void append(RolloutResult from, RolloutResult& to);

}  // namespace banyan::train
