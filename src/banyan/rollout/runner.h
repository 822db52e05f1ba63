// Runs one pass of the scheduler through the model: page copies, token ids, positions and pages,
// and the hidden rows that are drawn from or scored.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "banyan/models/causal_lm.h"
#include "banyan/ops/paged_attention.h"
#include "banyan/rollout/schedule/scheduler.h"

namespace banyan::rollout {

class Runner {
 public:
  // Both borrowed. grouped_attention: siblings attend the pages of their trunk together, which
  // changes no bit.
  Runner(models::CausalLM& model, ops::KvPool& pool, bool grouped_attention = true)
      : model_(model), pool_(pool) {
    batch_.set_grouped(grouped_attention);
  }

  // Hidden rows [decodes + trunks + prompt rows, E] of the pass, in the pass's order; undefined if
  // there are none. Good until the next run.
  at::Tensor run(const Pass& pass, const Scheduler& scheduler);

 private:
  models::CausalLM& model_;
  ops::KvPool& pool_;
  ops::PagedBatch batch_;  // filled anew each pass
};

}  // namespace banyan::rollout
