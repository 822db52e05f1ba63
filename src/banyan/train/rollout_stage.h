// Prompts to scored trajectories: the engine generates, each trajectory is handed to the scorer as
// it ends.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/core/host.h"
#include "banyan/rollout/engine.h"

namespace banyan::train {

struct RolloutResult {
  std::vector<Trajectory> trajectories;  // in the order in which they ended
  std::vector<Score> scores;             // in the order in which they came
  rollout::GenerateStats stats;
  double generate_seconds = 0.0;
  double wait_seconds = 0.0;  // for scores, after the last trajectory ended
};

rollout::EngineOptions engine_options(const Config& config);

// `step` keys the noise; validation uses val_kwargs and hands `validation` to the host.
RolloutResult run_rollout(const Config& config,
                          const std::vector<PromptRow>& rows,
                          int64_t step,
                          bool validation,
                          rollout::Engine& engine,
                          Host& host);

}  // namespace banyan::train
