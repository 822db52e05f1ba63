// Passes without gradients over the whole batch, each through one trie of all its valid
// trajectories: old and reference log-probabilities, entropies, values.
#pragma once

#include <string>

#include "banyan/models/causal_lm.h"
#include "banyan/train/batch.h"
#include "banyan/train/layout.h"
#include "banyan/train/walk.h"

namespace banyan::train {

struct BatchScores {
  TokenLists value;        // log-probabilities, or values of a value head
  TokenLists entropy;      // empty unless asked for
  TokenLists sum_squares;  // likewise
};

// Over the ranks of layout.context; `name` is the pass's in the log of layout.observer.
BatchScores score_batch(const Batch& batch,
                        models::CausalLM& model,
                        const trie::PlanOptions& options,
                        const HeadSpec& head,
                        const std::string& name,
                        const Layout& layout);

// Indices of the valid trajectories.
std::vector<int64_t> valid_of(const Batch& batch);

}  // namespace banyan::train
