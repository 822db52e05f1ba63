// An independent check of a plan against the batch it was made from, by the definitions of the
// specification (A6, A12), token by token. Torch-free; for tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/sample.h"
#include "banyan/trie/plan.h"

namespace banyan::testing {

// Every broken rule in words, at most one per block or sample; empty when the plan is right.
// Limits are those of `options`; `uniform` asks that blocks are all open or all closed.
std::vector<std::string> plan_errors(const std::vector<Sample>& samples,
                                     const trie::PlanOptions& options,
                                     const trie::Plan& plan,
                                     bool uniform);

// Largest number of tokens with live activations while the entries run: the block at work and the
// retained open blocks that wait for their backward.
int64_t peak_live_tokens(const trie::Plan& plan);

}  // namespace banyan::testing
