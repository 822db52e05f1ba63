// What the objectives share: a batch's samples, its plan, and the pass over it.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "banyan/parallel/groups.h"
#include "banyan/train/layout.h"
#include "banyan/train/objective.h"
#include "banyan/train/walk.h"

namespace banyan::train::detail {

// The loss of some complete samples of a batch.
struct Evaluated {
  double loss = 0.0;  // their share of the batch's mean
  algo::MetricMap metrics;
  TokenGradients gradients;
};
using Evaluate =
    std::function<Evaluated(const std::vector<int32_t>& samples, const TokenOutputs& outputs)>;

// The samples of all examples one after the other; uid = index.
std::vector<Sample> flatten(std::vector<Example> batch);

// Scored tokens of the samples, counted logically.
double num_scored(const std::vector<Sample>& samples);

// A model and how its batches are laid out.
struct Pass {
  models::CausalLM& model;
  SharingConfig sharing;
  double margin = 0.0;  // sharing.margin
  Layout layout;        // with the ranks; whether to share is decided for each batch
  BlockLimits limits;
  HeadSpec head = {};
};

// `samples_per_row` counts the samples of a row for data.micro_batch_size_per_gpu.
Pass pass_of(const FinetuneConfig& config,
             const Layout& layout,
             int64_t samples_per_row,
             models::CausalLM& model);

// The plan of a batch; sharing.mode=auto is decided for it.
trie::Plan plan_of(const Pass& pass, const std::vector<Sample>& samples, bool for_backward);

// Pairs (samples 2p and 2p + 1) that a plan completes in two loss entries.
class SplitPairs {
 public:
  // Runs their samples forward, without gradients; does nothing if no pair is split, here or, where
  // ranks walk together, on any of them.
  SplitPairs(const Pass& pass, const trie::Plan& plan, const std::vector<Sample>& samples);

  // `loss` on the pairs that samples `which` belong to, with gradients for those samples. Each pair
  // is counted in loss and metrics once over the walk.
  Evaluated evaluate(const Evaluate& loss,
                     const std::vector<int32_t>& which,
                     const TokenOutputs& outputs) const;

  int64_t num_computed() const { return num_computed_; }  // tokens of that forward

 private:
  std::vector<at::Tensor> values_;  // per sample; undefined: its pair is whole
  int64_t num_computed_ = 0;
};

// Plans the samples and walks the plan with gradients, with the other ranks where they walk
// together. `pairs`: samples 2p and 2p + 1 enter one loss, so they are evaluated together.
BatchResult train_pass(const Pass& pass,
                       const std::vector<Sample>& samples,
                       bool pairs,
                       const Evaluate& evaluate);

// The same without gradients; `evaluate` is called once, and not without samples.
BatchResult score_pass(const Pass& pass,
                       const std::vector<Sample>& samples,
                       const Evaluate& evaluate);

// Log-probabilities of the scored tokens of each sample.
std::vector<at::Tensor> log_probs(const Pass& pass, const std::vector<Sample>& samples);

std::unique_ptr<Objective> make_sft(const Pass& pass);
std::unique_ptr<Objective> make_preference(const FinetuneConfig& config,
                                           const Pass& pass,
                                           FinetuneHost& host,
                                           parallel::Groups& groups);
std::unique_ptr<Objective> make_reward_model(const FinetuneConfig& config, const Pass& pass);

}  // namespace banyan::train::detail
