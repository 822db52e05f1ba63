// What ranks that generate together with one model (models::CausalLM::tensor) must agree on. They
// take the same requests and run the same passes, so every choice follows from numbers that are
// equal on all of them; what a machine says (memory, time) is agreed here. A model that is not cut
// over ranks has what its own machine says.
#pragma once

#include <cstdint>

#include "banyan/models/causal_lm.h"
#include "banyan/parallel/tensor_parallel.h"

namespace banyan::rollout {

// Null: this one alone.
inline parallel::Collectives* ranks_together(const models::CausalLM& model) {
  return model.tensor() != nullptr ? &model.tensor()->ranks() : nullptr;
}

// (all) The smallest of what the ranks have.
int64_t least_together(const models::CausalLM& model, int64_t value);
// (all) What the first has.
double of_first_together(const models::CausalLM& model, double value);

// Key heads of the model that this rank holds, and the most that one rank does.
int64_t own_kv_heads(const models::CausalLM& model);
int64_t most_kv_heads(const models::CausalLM& model);

}  // namespace banyan::rollout
