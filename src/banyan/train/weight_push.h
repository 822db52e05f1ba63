// Weights over a group: from the ranks that train, however they cut them, to ranks that generate,
// each of which keeps its part. Tensor by tensor: as its master where the receivers compute with
// that, in the type of the model otherwise, from which the same compute form comes. Small tensors
// go together in messages of up to 16 MiB.
#pragma once

#include <set>
#include <string>

#include "banyan/models/causal_lm.h"
#include "banyan/parallel/fsdp.h"
#include "banyan/parallel/groups.h"
#include "banyan/train/sharded_model.h"

namespace banyan::train {

// The parameters that a model computes with as they are.
std::set<std::string> read_as_masters(models::CausalLM& model);

// (all that train) The first of them sends, over groups.hand_over. `fsdp` is the actor's, or null;
// `as_masters` is what the receivers' model says.
void send_weights(models::CausalLM& actor,
                  parallel::Fsdp* fsdp,
                  const std::set<std::string>& as_masters,
                  parallel::Groups& groups);

// (all that only generate) Whole tensors of `model`, one after the other.
void take_weights(models::CausalLM& model,
                  parallel::Collectives& hand_over,
                  const FilledWeights::Put& put);

}  // namespace banyan::train
