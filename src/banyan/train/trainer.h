// The training run: load or resume, then step, validate, save and log until the last step.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "banyan/core/config.h"
#include "banyan/core/host.h"
#include "banyan/models/causal_lm.h"
#include "banyan/rollout/generator.h"

namespace banyan::train {

struct TrainSummary {
  int64_t first_step = 0;  // global step the run started after (0, or the resumed checkpoint)
  int64_t last_step = 0;
  std::string checkpoint;      // newest checkpoint directory, "" if none was written
  bool stopped_early = false;  // the host asked to stop, or the data ended
};

// Makes what generates in place of the built-in engine. The actor is borrowed and outlives it.
using GeneratorFactory =
    std::function<std::unique_ptr<rollout::Generator>(models::CausalLM& actor)>;

// Throws [config] for a bad value and FileError for a bad model or checkpoint before anything is
// computed. Without `make_generator` the built-in engine generates.
TrainSummary train(const Config& config,
                   Host& host,
                   const GeneratorFactory& make_generator = nullptr);

}  // namespace banyan::train
