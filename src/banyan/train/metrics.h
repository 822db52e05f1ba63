// Metrics of a step under verl's names (algorithms spec section 13).
#pragma once

#include "banyan/core/host.h"
#include "banyan/train/step.h"

namespace banyan::train {

Metrics step_metrics(const Config& config, const StepResult& result, int64_t step);

}  // namespace banyan::train
