// The training batch of one step: trajectories with their scores, and what the passes before the
// update know about their tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/algo/advantage.h"
#include "banyan/core/config.h"
#include "banyan/core/sample.h"

namespace banyan::train {

// One 1-D tensor on the CPU per trajectory, over its masked response tokens [n_i]; undefined for a
// trajectory that is not valid. A list that the run has no use for is empty.
using TokenLists = std::vector<at::Tensor>;

// Trajectories in (row order of the prompts, index) order; every vector is per trajectory.
struct Batch {
  std::vector<Trajectory> trajectories;
  std::vector<Score> scores;
  std::vector<double> greedy_score;  // of the greedy response to the same prompt (remax)

  TokenLists old_log_prob;  // of the policy before the step; empty: on-policy (T31)
  TokenLists old_entropy;   // of the rows that predict the tokens, likewise
  TokenLists sum_squares;   // of the probabilities of those rows
  TokenLists ref_log_prob;
  TokenLists value;         // of the critic before the step
  TokenLists token_reward;  // fp64: the score on the last token, KL in the reward subtracted
  TokenLists advantage;     // fp64
  TokenLists returns;       // fp64
  TokenLists weight;        // fp64, rollout correction; empty: 1
  TokenLists keep;          // fp64 0 or 1: the mask that the losses use; empty: 1

  std::vector<int64_t> order;  // what the updates take, in this order (PF-PPO draws with
                               // replacement); empty: every trajectory once

  int64_t size() const { return static_cast<int64_t>(trajectories.size()); }
  // Masked response tokens of trajectory i, and those of them that rejection left.
  int64_t num_tokens(int64_t i) const;
  int64_t num_kept(int64_t i) const;
  // False for a failed scorer or a response without a masked token: no part in statistics or loss.
  bool valid(int64_t i) const;
  std::vector<uint8_t> validity() const;
};

// Pairs trajectories with their scores (both in any order) and sorts them by the prompts' order.
// Throws [banyan bug] if a trajectory has no score.
Batch make_batch(std::vector<Trajectory> trajectories,
                 const std::vector<Score>& scores,
                 const std::vector<int64_t>& row_order);

// What the trie sees of the trajectories `which`, which may repeat: uid = place in `which`; masked
// response tokens scored.
std::vector<Sample> samples_of(const Batch& batch, const std::vector<int64_t>& which);

// Lists as the algorithms take them: fp64, zeros for an undefined one. The other way for results.
algo::PerToken per_token(const Batch& batch, const TokenLists& lists);
TokenLists token_lists(const algo::PerToken& values);
// Lists of the trajectories `which` -> of all `size`; empty stays empty.
TokenLists spread(const std::vector<int64_t>& which, int64_t size, TokenLists lists);

// The loss mask of a trajectory [n_i] fp64 under `keep` (or all ones without it).
at::Tensor loss_mask(const Batch& batch, const TokenLists& keep, int64_t i);

// Values of a trajectory's response tokens where the mask is 1, in order.
template <typename T>
std::vector<double> masked(const Trajectory& trajectory, const std::vector<T>& values) {
  std::vector<double> out;
  for (size_t t = 0; t < trajectory.response_mask.size(); ++t) {
    if (trajectory.response_mask[t] != 0) out.push_back(static_cast<double>(values[t]));
  }
  return out;
}

// One mini-batch: indices into the batch, and the numbers that key its random choices.
struct MiniBatch {
  std::vector<int64_t> samples;
  int64_t step = 0;
  int64_t number = 0;  // in its step, over all epochs
};

struct MiniBatchOptions {
  int64_t size = 0;  // trajectories
  bool shuffle = false;
  uint64_t seed = 0;
  int64_t epochs = 1;
};

// Mini-batches of all epochs of a step, `size` trajectories at a time in the batch's order or in
// one global shuffle per epoch keyed by (seed, step, epoch) (T14). Trajectories without a token for
// the loss are left out.
std::vector<MiniBatch> mini_batches(const MiniBatchOptions& options,
                                    const Batch& batch,
                                    int64_t step);

}  // namespace banyan::train
