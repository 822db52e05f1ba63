// The walk of a plan: every pass with gradients (actor, critic, SFT, DPO, reward model) and every
// scoring pass goes through it (specification A12).
//
// Blocks run forward in the plan's order; an open block keeps the K and V of the tokens that later
// blocks attend to. When all tokens of some samples have run, the loss of those samples is asked
// for; its gradients wait until the backward of the blocks that hold the samples' sources. Per edge
// and per head row they are summed in fp64 in ascending order of value, so the sums depend neither
// on the plan nor on the order of the samples. The backward of a block adds to the fp32
// accumulators of the blocks that it carried from; a block's memory is freed with its backward.
//
// Over the ranks of a context-parallel group each rank runs its part of a block, or its block of a
// round (train/context_pass.h). The numbers of the heads are told to all, the losses are asked for
// on all, and a rank's gradients are those of its parts.
//
// Over the stages of a pipeline each rank runs its layers of every block, in the order of
// train/pipeline_pass.h. Losses are asked for on the last stage as their tokens have run; when the
// pass is through it tells the others the numbers, and they ask for the same losses, so that what a
// caller learns is the same on all stages.
//
// Ranks that share experts walk together, in a pipeline or not (train/pipeline_pass.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "banyan/models/causal_lm.h"
#include "banyan/nn/router_scope.h"
#include "banyan/train/block_pass.h"
#include "banyan/train/context_pass.h"
#include "banyan/train/pass_observer.h"
#include "banyan/trie/plan.h"

namespace banyan::train {

// Numbers of the scored tokens of some samples, one sample after the other, on the CPU; fp32 (fp64
// for a fp64 model).
struct TokenOutputs {
  at::Tensor value;  // [U] vocabulary head: log-probability of the token; value head: value of the
                     // row that predicts it
  at::Tensor entropy;            // [U] of that row, or undefined
  std::vector<int64_t> offsets;  // [samples + 1]
};

// d(loss) / d(outputs) of the same tokens; any device and float dtype.
struct TokenGradients {
  at::Tensor value;    // [U]
  at::Tensor entropy;  // [U], or undefined: none
};

// The loss of samples whose tokens have all run; `samples` are indices into the plan's input. The
// gradients are those of the whole loss's share of these samples.
using LossFunction =
    std::function<TokenGradients(const std::vector<int32_t>& samples, const TokenOutputs&)>;

// Samples that enter one nonlinear function together (specification A12 rule 5).
enum class LossScope : uint8_t {
  kSample,     // one sample: the function is called once per loss entry of the plan
  kMiniBatch,  // all of them: the function is called once, with the samples in the batch's order.
               // A plan with several loss entries runs forward without gradients first.
};

// Over whom a scope of the routers goes. Ranks without a plan close it themselves.
struct RouterWatch {
  nn::RouterScope* scope = nullptr;
  parallel::Collectives* ranks = nullptr;
};

// True where every rank goes through every pass, with or without a block: its weights lie in parts
// on several ranks.
bool walks_together(models::CausalLM& model);

// Measured, not modelled.
struct WalkStats {
  int64_t peak_live_tokens = 0;       // tokens with saved activations at one time
  int64_t peak_activation_bytes = 0;  // of those activations, and of what a backward makes again
  int64_t peak_carry_bytes = 0;       // K, V and gradient accumulators of open blocks at one time
  int64_t num_recomputed = 0;         // tokens that ran forward again for their backward
  int64_t num_scored_before = 0;      // tokens of the pass without gradients (kMiniBatch)
  double forward_seconds = 0.0;       // bodies and heads, those of a pass before included
  double recompute_seconds = 0.0;
  double backward_seconds = 0.0;
};

// Adds the gradients of `loss` to the model's parameters (allocated if missing, not zeroed). Where
// the weights are in parts over ranks, all of them walk together, one without samples with an empty
// plan; likewise for score_samples.
// `observer`, if given, sees the pass; it changes no number. `routers`, if given, counts what the
// routers of the model choose, is closed over `ranks`, and adds its losses to the gradients; a plan
// whose backwards begin before its last forward runs forward without gradients first, if it has
// losses. `context`: the ranks that walk the plan together, all with the same arguments. Throws
// [banyan bug] on a plan that runs a backward before the losses it needs, [config] on more ranks
// than tokens where experts are dealt out.
WalkStats walk(models::CausalLM& model,
               const trie::Plan& plan,
               const HeadSpec& head,
               LossScope scope,
               const LossFunction& loss,
               PassObserver* observer = nullptr,
               const RouterWatch& routers = {},
               const ContextGroup& context = {});

// Numbers of every scored token, per sample in the order of the batch, without gradients: old and
// reference passes, values, `banyan score`. CPU, fp32 (fp64 for a fp64 model).
struct SampleScores {
  std::vector<at::Tensor> value;        // per sample [scored tokens]: log-probability, or value
  std::vector<at::Tensor> entropy;      // likewise; empty unless asked for
  std::vector<at::Tensor> sum_squares;  // likewise
};
SampleScores score_samples(models::CausalLM& model,
                           const trie::Plan& plan,
                           const HeadSpec& head,
                           PassObserver* observer = nullptr,
                           const ContextGroup& context = {});

}  // namespace banyan::train
