// Prompts to the training batch of a step: rollouts until data.train_batch_size groups are there
// that are worth learning from.
//
// algorithm.filter_groups (DAPO's dynamic sampling): groups whose samples all have one metric are
// dropped, and twice as many further prompts are drawn as groups are missing (at most a whole
// batch); what is over at the end is dropped too. A row that comes again within a step is passed
// over: its samples would be the same.
#pragma once

#include <cstdint>
#include <string>

#include "banyan/train/batch.h"
#include "banyan/train/rollout_stage.h"

namespace banyan::train {

struct FilterStats {
  int64_t num_gen_batches = 0;  // rollouts of this step
  int64_t evicted_samples = 0;  // of groups that were all alike
  int64_t surplus_samples = 0;  // of groups beyond the batch
};

struct SampledBatch {
  bool end_of_data = false;  // the host has no further rows
  std::string refused;       // why the samples cannot be learned from
  Batch batch;
  RolloutResult rollout;  // of all rollouts; trajectories moved into `batch`
  FilterStats filter;
};

// Throws [algorithm.filter_groups.metric] for an entry that the scorer does not return.
SampledBatch sample_batch(const Generation& with, int64_t step);

}  // namespace banyan::train
