// Rollouts that are kept in files and taken from there in place of generating (verl's
// skip.rollout): the same responses under another layout of ranks, another learning rate, another
// loss. A step's file, <dump_dir>/<step>.json, is a list with one entry per prompt:
//   {"row", "tokens": of the prompt, "ended": [{"index", "response", "rollout_log_probs", ...}]}
// (train/unfinished.h). Prompts come from the data as ever and are compared; rewards are asked for
// anew.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/rollout/generator.h"

namespace banyan::train {

// Throws [config] where a key is missing or does not go with rollouts that end early.
void check_rollout_dump(const Config& config);

// True if the responses of a step are kept, or taken where its file is there.
bool has_rollout_dump(const Config& config, int64_t step);

// True if the step's file is there.
bool is_rollout_kept(const Config& config, int64_t step);

// Gives the responses to `prompts` from the step's file. Throws [skip.rollout] naming the file and
// the row where it holds other prompts or lacks a response, FileError for a file that is not there
// or no such list.
void replay_rollout(const Config& config,
                    int64_t step,
                    const std::vector<rollout::Prompt>& prompts,
                    const rollout::OnFinished& on_finished,
                    rollout::GenerateStats& stats);

// Writes the step's file, unless it is there; trajectories of one row next to each other or not.
void keep_rollout(const Config& config, int64_t step, const std::vector<Trajectory>& trajectories);

}  // namespace banyan::train
