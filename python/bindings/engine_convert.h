// What goes into the engine and what comes out, as Python values.
#pragma once

#include <vector>

#include "banyan/rollout/engine.h"
#include "convert.h"

namespace banyan::bindings {

rollout::EngineOptions engine_options(const py::dict& from);
rollout::SamplingParams sampling_params(const py::dict& from);
rollout::Request request_from(const py::dict& from);
rollout::Prompt prompt_from(const py::dict& from);
rollout::PauseMode pause_mode(const std::string& name);

// Responses of one request that end together share one list of prompt log-probabilities.
py::list to_list(const std::vector<rollout::Event>& events);
py::dict to_dict(const rollout::EngineStats& stats);
py::dict to_dict(const rollout::GenerateStats& stats);
py::list to_list(const std::vector<WeightSpan>& spans);

}  // namespace banyan::bindings
