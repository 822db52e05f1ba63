// One block of a plan through the model: forward to edge log-probabilities, and back from their
// gradients. Everything between "samples" and "numbers per sample" that scoring and training share
// is here.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "banyan/core/attention_context.h"
#include "banyan/models/causal_lm.h"
#include "banyan/ops/edge_logprob.h"
#include "banyan/trie/plan.h"

namespace banyan::train {

// What a forward left behind; one per block in flight.
struct BlockForward {
  std::unique_ptr<AttentionContext> attention;
  std::unique_ptr<models::Saved> saved;  // null when nothing will be differentiated
  at::Tensor rows;                       // [R] int64 packed tokens that have a head row
  at::Tensor row_hidden;                 // [R, E]
  int64_t num_tokens = 0;                // T
  ops::EdgeIndex index;
  ops::EdgeLogprob edges;
};

// Runs the tokens of `block`. `keep` saves activations for backward_block.
BlockForward forward_block(models::CausalLM& model,
                           const trie::Block& block,
                           double temperature,
                           bool with_entropy,
                           bool keep);

// Scored logical tokens of the samples of one block without carry: samples one after the other.
struct BlockTokens {
  std::vector<int32_t> edge;     // [U]
  std::vector<int32_t> row;      // [U]
  std::vector<int64_t> offsets;  // [samples + 1]
};
BlockTokens block_tokens(const trie::Plan& plan, const trie::Block& block);

// Edge and row values gathered to logical tokens, [U].
at::Tensor logical_log_prob(const BlockForward& forward, const BlockTokens& tokens);
at::Tensor logical_entropy(const BlockForward& forward, const BlockTokens& tokens);

// grad_log_prob [U] and grad_entropy [U] (or undefined): summed per edge and row in fp64 in logical
// order, then through head and model into the parameters' gradients. Consumes `forward`.
void backward_block(models::CausalLM& model,
                    const trie::Block& block,
                    const BlockTokens& tokens,
                    BlockForward forward,
                    const at::Tensor& grad_log_prob,
                    const at::Tensor& grad_entropy,
                    double temperature);

// Log-probabilities (and entropies of the predicting rows) of every scored token, per sample,
// without gradients: old and reference passes, `banyan score`.
struct SampleScores {
  std::vector<at::Tensor> log_prob;  // per sample [scored tokens], fp32 (fp64 for a fp64 model)
  std::vector<at::Tensor> entropy;   // likewise; empty unless asked for
};
SampleScores score_samples(models::CausalLM& model,
                           const trie::Plan& plan,
                           double temperature,
                           bool with_entropy);

// Logits of every token of each sample, [tokens, V] fp32 (fp64): small inputs, for parity with
// other systems.
std::vector<at::Tensor> sample_logits(models::CausalLM& model,
                                      const std::vector<Sample>& samples,
                                      bool share);

}  // namespace banyan::train
