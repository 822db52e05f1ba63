// A training pass of fixed loss over a plan, timed: what calibration fits and benchmarks compare.
//
// The loss is the mean negative log-probability of the scored tokens (for a value head: minus the
// mean value), so it needs no advantages. Parameter gradients are added as in a training step; the
// caller zeroes them.
#pragma once

#include "banyan/models/causal_lm.h"
#include "banyan/train/walk.h"
#include "banyan/trie/plan.h"

namespace banyan::train {

struct ProbeResult {
  double loss = 0.0;
  WalkStats stats;
};

ProbeResult probe_pass(models::CausalLM& model, const trie::Plan& plan);

}  // namespace banyan::train
