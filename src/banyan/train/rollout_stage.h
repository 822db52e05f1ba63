// Prompts to scored trajectories: the engine generates, each trajectory is handed to the scorer as
// it ends. A rollout may end when enough groups are whole; the rest comes back as it is. With a
// reward model the scorer waits for the model's numbers, which come from one pass
// over all trajectories. Ranks that hold one model together take the same share of the prompts.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/core/host.h"
#include "banyan/parallel/collectives.h"
#include "banyan/rollout/engine.h"
#include "banyan/train/reward_model.h"
#include "banyan/train/unfinished.h"

namespace banyan::train {

struct RolloutResult {
  std::vector<Trajectory> trajectories;  // of whole groups, by row, each in the order of its ends
  std::vector<Score> scores;             // in the order in which they came
  rollout::GenerateStats stats;
  double generate_seconds = 0.0;
  double wait_seconds = 0.0;                // for scores, after the last trajectory ended
  std::vector<UnfinishedGroup> unfinished;  // cut off, in the order of their rows
};

// What a rollout generates, and when it is over.
struct RolloutWork {
  std::vector<PromptRow> rows;
  std::vector<UnfinishedGroup> resumed = {};  // that go on; no row of `rows`
  int64_t enough = 0;                         // groups; then the rest is cut off. 0: all

  int64_t num_groups() const { return static_cast<int64_t>(rows.size() + resumed.size()); }
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
  parallel::Collectives* ranks = nullptr;  // that share the prompts; null: this one alone
  // Neighbours among them that generate the same prompts with one model; null: each its own. The
  // first of them hands the trajectories to the scorer and tells them to all.
  parallel::Collectives* together = nullptr;

  bool shares_experts = false;  // with others, who then generate together

  bool scores() const { return together == nullptr || together->is_first(); }
};

rollout::EngineOptions engine_options(const Config& config);

// `step` keys the noise, so that every rank draws for its prompts what one process would.
RolloutResult run_rollout(const Generation& with, RolloutWork work, RolloutKind kind, int64_t step);

// Adds the trajectories, scores and figures of `from`.
void append(RolloutResult from, RolloutResult& to);

}  // namespace banyan::train
