// Runs one pass of the scheduler through the model: page copies, token ids and positions, paged
// attention, and the hidden rows that are drawn from.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/models/causal_lm.h"
#include "banyan/ops/paged_attention.h"
#include "banyan/rollout/schedule/scheduler.h"

namespace banyan::rollout {

class Runner {
 public:
  // Both borrowed.
  Runner(models::CausalLM& model, ops::KvPool& pool) : model_(model), pool_(pool) {}

  // Hidden rows [decodes + trunks + prompt rows, E] of the pass, in that order and the pass's;
  // undefined if it wants none.
  at::Tensor run(const Pass& pass, const Scheduler& scheduler);

 private:
  models::CausalLM& model_;
  ops::KvPool& pool_;
  at::Tensor ids_;        // [>= T] int32, CPU, written anew each pass
  at::Tensor positions_;  // likewise
};

}  // namespace banyan::rollout
