#include "banyan/train/apply_gradients.h"

#include <algorithm>
#include <cmath>

#include "banyan/core/profile.h"

namespace banyan::train {

optim::AdamWOptions adamw_options(const OptimConfig& optim) {
  return {.beta1 = optim.betas[0],
          .beta2 = optim.betas[1],
          .eps = 1e-8,
          .weight_decay = optim.weight_decay};
}

AppliedGradients apply_gradients(const OptimConfig& optim,
                                 double lr,
                                 double loss,
                                 models::CausalLM& model,
                                 optim::AdamW& optimizer) {
  const profile::PhaseScope phase(profile::Phase::kOptimizer);
  AppliedGradients applied;
  applied.grad_norm = optimizer.grad_norm();
  applied.skipped = !std::isfinite(applied.grad_norm) || !std::isfinite(loss);
  if (applied.skipped) {
    model.params().rest();
    return applied;
  }
  const double clip = optim.clip_grad;
  const double scale = clip > 0.0 ? std::min(1.0, clip / (applied.grad_norm + 1e-6)) : 1.0;
  optimizer.step(lr, scale);
  model.params().rest();  // so that gradients and masters are not in memory together
  model.params().repack();
  model.params().rest();
  return applied;
}

}  // namespace banyan::train
