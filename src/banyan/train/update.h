// The actor's update: per mini-batch plan, walk, clip, AdamW, repack.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "banyan/algo/loss.h"
#include "banyan/core/config.h"
#include "banyan/models/causal_lm.h"
#include "banyan/optim/adamw.h"
#include "banyan/train/batch.h"
#include "banyan/train/layout.h"
#include "banyan/train/walk.h"

namespace banyan::train {

struct UpdateResult {
  algo::LossMetrics loss;       // exact sums over the mini-batch
  double num_tokens = 0.0;      // N, over all ranks as every figure here
  double num_sequences = 0.0;   // B
  double grad_norm = 0.0;       // before clipping
  bool skipped = false;         // a non-finite norm or loss: weights unchanged
  int64_t logical_tokens = 0;   // T0
  int64_t unique_tokens = 0;    // T1 of the uncut trie
  int64_t computed_tokens = 0;  // with replayed trunks
  int64_t num_blocks = 0;
  std::vector<int64_t> rank_tokens;  // logical, of each rank; empty for one process
  double dp_imbalance = 1.0;         // highest modelled time of a rank over the mean
  WalkStats walk;
  std::vector<at::Tensor> log_prob;  // per sample of the mini-batch, as this pass computed them
  std::vector<std::string> warnings;
  bool sharing_failed = false;               // sharing.verify found other gradients without sharing
  algo::MetricMap correction;                // names of "rollout_corr/", of bypass mode
  std::optional<nn::RouterFigures> routers;  // of a model with experts
};

algo::LossOptions loss_options(const Config& config);

// Whether the actor's routers compute in fp64. Throws [config] for another word than fp32, fp64.
bool router_in_double(const Config& config);

MiniBatchOptions actor_mini_batches(const Config& config);

// `to` becomes the sums of its samples and those of `from`.
void add_metrics(const algo::LossMetrics& from, algo::LossMetrics& to);

// `verify`: compute the gradients without sharing too (train/verify.h).
UpdateResult update(const Config& config,
                    const Batch& batch,
                    const MiniBatch& mini_batch,
                    const Layout& layout,
                    bool verify,
                    double lr,
                    models::CausalLM& model,
                    optim::AdamW& optimizer);

// Gradients of the mini-batch only (no clipping, no optimizer), summed over layout.adding().
UpdateResult accumulate_gradients(const Config& config,
                                  const Batch& batch,
                                  const MiniBatch& mini_batch,
                                  const Layout& layout,
                                  models::CausalLM& model);

}  // namespace banyan::train
