// Prompts to the training batch of a step: rollouts until data.train_batch_size groups are there
// that are worth learning from.
//
// algorithm.filter_groups (DAPO's dynamic sampling): groups whose samples all have one metric are
// dropped, and twice as many further prompts are drawn as groups are missing (at most a whole
// batch); what is over at the end is dropped too. A row that comes again within a step is passed
// over: its samples would be the same.
//
// rollout.over_sample_rate = r: batch / (1 - r) prompts are started and the rollout ends when
// (1 - r) of them are whole groups, so that nobody waits for the longest responses. What is cut off
// is dropped or, with banyan.partial_rollout, goes on in the next step.
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

struct OverSampleStats {
  int64_t cut_groups = 0;         // ended because enough others were whole
  int64_t resumed_responses = 0;  // that an earlier step had cut off
  int64_t evicted_samples = 0;    // of groups that would come from too many versions
};

struct SampledBatch {
  bool end_of_data = false;  // the host has no further rows
  std::string refused;       // why the samples cannot be learned from
  Batch batch;
  RolloutResult rollout;  // of all rollouts; trajectories moved into `batch`
  FilterStats filter;
  OverSampleStats over_sample;
  // Where other ranks generate: that these waited for orders, and those that train for the batch.
  double idle_seconds = 0.0;
  double waited_seconds = 0.0;
};

// `unfinished`: what earlier steps cut off goes in, what this one does comes out (none without
// banyan.partial_rollout). Throws [algorithm.filter_groups.metric] for an entry that the scorer
// does not return.
SampledBatch sample_batch(const Generation& with,
                          int64_t step,
                          std::vector<UnfinishedGroup>& unfinished);

}  // namespace banyan::train
