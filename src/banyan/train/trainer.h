// The training run: load or resume, then step, validate, save and log until the last step.
#pragma once

#include <cstdint>
#include <string>

#include "banyan/core/config.h"
#include "banyan/core/host.h"
#include "banyan/parallel/groups.h"
#include "banyan/train/sampler.h"

namespace banyan::train {

struct TrainSummary {
  int64_t first_step = 0;  // global step the run started after (0, or the resumed checkpoint)
  int64_t last_step = 0;
  std::string checkpoint;      // newest checkpoint directory, "" if none was written
  bool stopped_early = false;  // the host asked to stop, or the data ended
};

// Throws [config] for a bad value and FileError for a bad model or checkpoint before anything is
// computed. Without `make_generator` the built-in engine generates.
//
// `groups`: the processes that train together, in groups that share the samples (train/exchange.h)
// or the weights (parallel/tensor_parallel.h, parallel/fsdp.h); null: this one alone. Each calls
// train with the same configuration and a host that gives the same rows. The first writes
// checkpoints, and what is logged is the same on all. Those that only generate
// (train/separate_rollout.h) return an empty summary. Throws parallel::RankError when another is
// gone or late.
TrainSummary train(const Config& config,
                   Host& host,
                   const GeneratorFactory& make_generator = nullptr,
                   parallel::Groups* groups = nullptr);

}  // namespace banyan::train
