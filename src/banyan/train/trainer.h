// The training run: load or resume, then step, validate, save and log until the last step.
#pragma once

#include <cstdint>
#include <string>

#include "banyan/core/config.h"
#include "banyan/core/host.h"

namespace banyan::train {

struct TrainSummary {
  int64_t first_step = 0;  // global step the run started after (0, or the resumed checkpoint)
  int64_t last_step = 0;
  std::string checkpoint;      // newest checkpoint directory, "" if none was written
  bool stopped_early = false;  // the host asked to stop, or the data ended
};

// Throws [config] for a bad value and FileError for a bad model or checkpoint before anything is
// computed.
TrainSummary train(const Config& config, Host& host);

}  // namespace banyan::train
