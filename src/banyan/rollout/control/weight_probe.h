// A forward over a few tokens, to see that weights compute: numbers that are finite one by one may
// overflow together, and a file may hold garbage that is finite.
#pragma once

#include <string>

#include "banyan/models/causal_lm.h"

namespace banyan::rollout {

// Scores kProbeTokens ids spread over the vocabulary on a page of its own. Returns what is wrong,
// "" if every log-probability is a finite number. Costs a small pass; whoever calls it has the
// model to itself.
std::string probe_weights(models::CausalLM& model);

inline constexpr int32_t kProbeTokens = 16;

}  // namespace banyan::rollout
