// What a generate call may ask for. Throws [rollout] texts that name the field, what was wanted,
// what came.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/rollout/engine.h"

namespace banyan::rollout {

void check_options(const EngineOptions& options);
void check_params(const SamplingParams& params, int64_t vocab);
// max_len: positions that prompt and response may take together.
void check_prompts(const std::vector<Prompt>& prompts,
                   const EngineOptions& options,
                   int64_t vocab,
                   int64_t max_len);

}  // namespace banyan::rollout
