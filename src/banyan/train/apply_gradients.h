// The end of an update: gradient norm, clipping, the optimizer's step and the new compute forms.
#pragma once

#include "banyan/core/config.h"
#include "banyan/models/causal_lm.h"
#include "banyan/optim/adamw.h"

namespace banyan::train {

optim::AdamWOptions adamw_options(const OptimConfig& optim);

struct AppliedGradients {
  double grad_norm = 0.0;  // before clipping
  bool skipped = false;    // norm or loss is not finite: weights unchanged
};

// Gradients are sums over the ranks: of all numbers, or of those that the optimizer owns.
// Re-packing the weights is the whole hand-over to the rollout: it reads the same packed form.
AppliedGradients apply_gradients(const OptimConfig& optim,
                                 double lr,
                                 double loss,
                                 models::CausalLM& model,
                                 optim::AdamW& optimizer);

}  // namespace banyan::train
