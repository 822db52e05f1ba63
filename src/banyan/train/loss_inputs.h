// What the actor's loss takes besides the model's numbers: masks, weights and normalisers of a
// mini-batch, and its samples' tensors; and losses that compare all tokens of a mini-batch when its
// samples are spread over ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/algo/loss.h"
#include "banyan/core/config.h"
#include "banyan/models/causal_lm.h"
#include "banyan/train/batch.h"
#include "banyan/train/layout.h"
#include "banyan/train/walk.h"

namespace banyan::train {

// Weight and mask of the samples of one mini-batch.
struct SampleWeights {
  TokenLists weight;  // per sample; empty: 1
  TokenLists mask;    // per sample
  algo::LossScale scale;
  algo::MetricMap metrics;
};

// Of the whole mini-batch, on every rank. In bypass mode the model scores it first (T35).
SampleWeights sample_weights(const Config& config,
                             const Batch& batch,
                             const std::vector<int64_t>& samples,
                             const Layout& layout,
                             models::CausalLM& model);

// The tensors of the places `samples` of the mini-batch, one after the other.
algo::LossTokens loss_tokens(const Config& config,
                             const Batch& batch,
                             const std::vector<int64_t>& mini_batch,
                             const SampleWeights& weights,
                             const std::vector<int32_t>& samples,
                             const TokenOutputs& outputs);

// The loss of a whole mini-batch and its gradients by place, on every rank: each scores its own
// samples without gradients and tells the others.
struct WholeLoss {
  algo::LossMetrics metrics;
  TokenLists grad_log_prob;
  TokenLists grad_entropy;  // empty: none

  // Those of the places `which`, one after the other.
  TokenGradients gradients(const std::vector<int32_t>& which) const;
};
WholeLoss whole_loss(const Config& config,
                     const Batch& batch,
                     const std::vector<int64_t>& mini_batch,
                     const SampleWeights& weights,
                     const HeadSpec& head,
                     const algo::LossOptions& options,
                     const Layout& layout,
                     models::CausalLM& model);

}  // namespace banyan::train
