// What data-parallel ranks tell each other in a step. Each rank generates, scores and learns from
// its own groups; everything per sample is then told to all, so that every rank holds the whole
// batch: statistics over the batch (advantages, normalisers, metrics) are computed everywhere
// alike, from the same numbers in the same order as in one process.
//
//   share_of      prompts -> those of this rank, by group
//   exchange      rollouts of all ranks -> the rollout
//   merge_update  figures of all ranks -> those of the update
// Which rank computes what in between: train/spread.h.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "banyan/parallel/collectives.h"
#include "banyan/train/rollout_stage.h"
#include "banyan/train/update.h"

namespace banyan::train {

// Group g of `work`, those that go on first, is of share g modulo the number of shares; so are the
// groups dealt out after which a rollout ends early. Each share waits for one at least.
RolloutWork share_of(RolloutWork work, int64_t share, int64_t num_shares);

// Trajectories, scores and unfinished groups of all ranks; counts are summed, times the longest.
RolloutResult exchange(RolloutResult own, parallel::Collectives& ranks);

// The update's figures over all ranks. `places` are those of result.log_prob that are this rank's.
void merge_update(const std::vector<int64_t>& places,
                  UpdateResult& result,
                  parallel::Collectives& ranks);

// Of a walk that these ranks took together: what each computed again is added, peaks are the
// highest.
void merge_walk(WalkStats& stats, parallel::Collectives& ranks);
// (all) Peaks are the largest of any stage of a pipeline; what is recomputed is the same on all.
void merge_peaks(WalkStats& stats, parallel::Collectives& stages);

// The cost model of the first rank, on all.
trie::CostModel broadcast(const trie::CostModel& cost, parallel::Collectives& ranks);

// What the first rank finds, on all: for choices that depend on the machine.
int64_t of_first(parallel::Collectives& ranks, const std::function<int64_t()>& find);

// Sums of plain numbers over the ranks, in rank order.
std::vector<double> sum_numbers(const std::vector<double>& own, parallel::Collectives& ranks);

}  // namespace banyan::train
