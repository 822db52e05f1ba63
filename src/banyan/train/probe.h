// A training pass of fixed loss over a plan, timed: what calibration fits and benchmarks compare.
//
// The loss is the mean negative log-probability of the scored tokens (for a value head: minus the
// mean value), so it needs no advantages. Parameter gradients are added as in a training step; the
// caller zeroes them.
#pragma once

#include "banyan/models/causal_lm.h"
#include "banyan/trie/plan.h"

namespace banyan::train {

struct ProbeResult {
  double loss = 0.0;
  double forward_seconds = 0.0;   // body and head
  double backward_seconds = 0.0;  // forwards that run again included
  double seconds() const { return forward_seconds + backward_seconds; }
};

ProbeResult probe_pass(models::CausalLM& model, const trie::Plan& plan);

}  // namespace banyan::train
