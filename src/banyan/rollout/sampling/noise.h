// Whose noise a response draws with (rollout specification 3.4). Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/rng.h"
#include "banyan/rollout/request.h"

namespace banyan::rollout {

// 64 bits of the first `count` tokens.
uint64_t prompt_digest(const std::vector<int32_t>& tokens, int64_t count);

// In training (row >= 0) (seed, step, row, index). Otherwise (seed + index, digest of the original
// prompt), so that a group equals n requests with seeds in a row, and one seed over many prompts
// gives each its own noise.
NoiseKey noise_key(const Request& request, int32_t index);

}  // namespace banyan::rollout
