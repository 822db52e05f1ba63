// The training batch of one step: trajectories with their scores, advantages and log-probabilities.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/core/sample.h"
#include "banyan/trie/plan.h"

namespace banyan::train {

// Trajectories in (row order of the prompts, index) order; every vector is per trajectory.
struct Batch {
  std::vector<Trajectory> trajectories;
  std::vector<Score> scores;
  std::vector<at::Tensor> advantage;     // [response tokens with mask 1] fp64
  std::vector<at::Tensor> returns;       // likewise
  std::vector<at::Tensor> old_log_prob;  // [response tokens with mask 1]; empty: on-policy (T31)
  std::vector<at::Tensor> ref_log_prob;  // empty without use_kl_loss

  int64_t size() const { return static_cast<int64_t>(trajectories.size()); }
  // Masked response tokens of trajectory i.
  int64_t num_tokens(int64_t i) const;
  // False for a failed scorer or a response without a masked token: no part in statistics or loss.
  bool valid(int64_t i) const;
};

// Pairs trajectories with their scores (both in any order) and sorts them by the prompts' order.
// Throws [banyan bug] if a trajectory has no score.
Batch make_batch(std::vector<Trajectory> trajectories,
                 const std::vector<Score>& scores,
                 const std::vector<int64_t>& row_order);

// Advantages of the batch under `algorithm`; invalid trajectories get 0.
void set_advantages(const AlgorithmConfig& algorithm, Batch& batch);

// What the trie sees of the trajectories `which`: uid = index in the batch; masked response tokens
// scored.
std::vector<Sample> samples_of(const Batch& batch, const std::vector<int64_t>& which);

// How samples are merged and cut under the keys of `sharing`. Throws [config] for an unknown word.
trie::PlanOptions plan_options(const SharingConfig& sharing);

// The limits of a plan from the keys (ppo_micro_batch_size_per_gpu, ppo_max_token_len_per_gpu,
// sharing.*).
trie::PlanOptions plan_options(const Config& config);

// Mini-batches of one epoch: indices of valid trajectories, `ppo_mini_batch_size * n` at a time, in
// batch order or in one global shuffle keyed by (data_loader_seed, step, epoch) (T14).
std::vector<std::vector<int64_t>> mini_batches(const Config& config,
                                               const Batch& batch,
                                               int64_t step,
                                               int64_t epoch);

}  // namespace banyan::train
