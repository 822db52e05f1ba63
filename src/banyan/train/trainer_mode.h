// Who generates, and how far ahead of the updates: trainer.v1.trainer_mode and what belongs to it.
//   sync            a step's samples are drawn from the weights after the step before
//   separate_async  from those of one step earlier, while the step before updates
//                   (num_warmup_batches = 1; 0: as sync)
// on ranks that train as well (hybrid_engine) or, with separate_async always, on ranks that only
// generate.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/config.h"

namespace banyan::train {

// Ranks that only generate; 0: those that train do.
int64_t num_rollout_ranks(const Config& config);

// Batches that are generated ahead: 0 or 1. A batch of one step is as many steps old.
int64_t batches_ahead(const Config& config);

// Throws [config] naming the key of what does not go together. Lines to say are added to `notes`.
void check_trainer_mode(const Config& config, std::vector<std::string>& notes);

}  // namespace banyan::train
