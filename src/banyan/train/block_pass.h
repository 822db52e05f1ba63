// One block of a plan through the model: tokens to the numbers of its head rows, and back. Which
// blocks run when, and what a loss sees of them, is walk.h's.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "banyan/core/attention_context.h"
#include "banyan/models/causal_lm.h"
#include "banyan/ops/edge_logprob.h"
#include "banyan/trie/plan.h"

namespace banyan::train {

// What is read off a head row. The kind of head is the model's.
struct HeadSpec {
  double temperature = 1.0;       // vocabulary head
  bool with_entropy = false;      // vocabulary head: entropy of the row
  bool with_sum_squares = false;  // vocabulary head: sum of squared probabilities of the row
};

// What the forward of the model's body leaves for the backward; one per block in flight.
struct BlockBody {
  std::unique_ptr<AttentionContext> attention;
  std::unique_ptr<models::Saved> saved;  // null when nothing will be differentiated
  at::Tensor rows;        // what the next stage of a pipeline gets; undefined on the last
  at::Tensor row_hidden;  // [R, E] hidden of the head rows; undefined on other stages than the last
  // Bytes of the activations in `saved` and `row_hidden`.
  int64_t bytes() const;
  // Most of them at one time during the backward, with what that computes again.
  int64_t backward_bytes() const;
};

// What the head gives; small, so that it stays when the activations go.
struct BlockHead {
  ops::EdgeIndex index;
  ops::EdgeLogprob edges;  // vocabulary head: logprob [X], lse and entropy [R]
  at::Tensor sum_squares;  // [R], or undefined
  at::Tensor value;        // value head: [R]
};

// Runs the own tokens of `block` on `attention`, which knows where the K and V of the others are.
// `keep` saves activations for backward_body. Of a model in stages: one chunk, on the rows that
// the stage before gave, or ids where that is undefined.
BlockBody forward_body(models::CausalLM& model,
                       const trie::Block& block,
                       std::unique_ptr<AttentionContext> attention,
                       bool keep,
                       int64_t chunk = 0,
                       const at::Tensor& input = {});

// The head on the rows of a body's forward. `memory`, if given, is left for backward_body.
BlockHead forward_head(models::CausalLM& model,
                       const trie::Block& block,
                       const at::Tensor& row_hidden,
                       const HeadSpec& spec,
                       ops::HeadMemory* memory = nullptr);

// Gradients of what forward_head gave, fp64 on the CPU.
struct HeadGradients {
  at::Tensor edge;     // [X] of the log-probabilities; undefined with a value head
  at::Tensor row;      // [R] of the values; undefined with a vocabulary head
  at::Tensor entropy;  // [R], or undefined
};

// Through the head into its gradients: d(hidden) [T, E] of the block's own tokens, for
// backward_body. Frees the rows of `body`.
at::Tensor backward_head(models::CausalLM& model,
                         const trie::Block& block,
                         BlockBody& body,
                         const BlockHead& head,
                         const HeadGradients& gradients,
                         const HeadSpec& spec,
                         ops::HeadMemory* memory = nullptr);

// Through the body into the parameters' gradients, and into the accumulators of the blocks that
// this one carries from. Consumes `body`. Returns the gradient of the chunk's input; undefined for
// ids.
at::Tensor backward_body(models::CausalLM& model,
                         BlockBody body,
                         const at::Tensor& grad,
                         int64_t chunk = 0);

// Logits of every token of each sample, [tokens, V] fp32 (fp64): small inputs, for parity with
// other systems.
std::vector<at::Tensor> sample_logits(models::CausalLM& model,
                                      const std::vector<Sample>& samples,
                                      bool share);

}  // namespace banyan::train
