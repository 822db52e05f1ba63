// Weights over a group: from the ranks that train, however they cut them, to ranks that hold a
// whole model. Tensor by tensor, each as its master, small ones together in messages of 16 MiB.
#pragma once

#include "banyan/models/causal_lm.h"
#include "banyan/parallel/fsdp.h"
#include "banyan/parallel/groups.h"

namespace banyan::train {

// (all that train) The first of them sends, over groups.hand_over. `fsdp` is the actor's, or null.
void send_weights(models::CausalLM& actor, parallel::Fsdp* fsdp, parallel::Groups& groups);

// (all that only generate) Fills a whole model of the same names and shapes.
void take_weights(models::CausalLM& model, parallel::Collectives& hand_over);

}  // namespace banyan::train
