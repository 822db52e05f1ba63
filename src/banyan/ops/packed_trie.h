// A packed batch for callers who bring their own model: the trie, its edges, and the two ops that
// read them, on tensors as a LibTorch program holds them (the Python library is built on this).
//
// The compute options of a call are those of its tensors: bf16 on a CPU takes the native kernels,
// everything else plain LibTorch operators. The head's weight is a plain matrix here and its
// compute form is packed in each call; banyan's own models keep theirs in nn::Weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

#include "banyan/core/attention_context.h"
#include "banyan/core/sample.h"
#include "banyan/ops/edge_logprob.h"
#include "banyan/ops/trie_attention.h"
#include "banyan/trie/plan.h"
#include "banyan/trie/trie.h"

namespace banyan::ops {

// Immutable but for working memory, which a lock guards: any thread may call.
class PackedTrie {
 public:
  // Throws [trie] on no samples, an empty sample, vectors of unequal length, a negative token id.
  PackedTrie(const std::vector<Sample>& samples, const trie::BuildOptions& options);
  PackedTrie(const PackedTrie&) = delete;
  PackedTrie& operator=(const PackedTrie&) = delete;

  const trie::Trie& trie() const { return trie_; }
  const trie::Edges& edges() const { return edges_; }
  const trie::LogicalTokens& logical() const { return logical_; }

  struct Attention {
    at::Tensor out;  // [T, H, D] dtype of q
    at::Tensor lse;  // [T, H] fp32 (fp64 for fp64)
  };

  // q [T, H, D], k and v [T, K, D], H a multiple of K; bf16, fp32 or fp64. Throws [tree_attention]
  // on another dtype, [trie_attention] on another shape.
  Attention attention_forward(const at::Tensor& q,
                              const at::Tensor& k,
                              const at::Tensor& v,
                              double scale);
  AttentionGradients attention_backward(const at::Tensor& grad_out,
                                        const at::Tensor& q,
                                        const at::Tensor& k,
                                        const at::Tensor& v,
                                        const Attention& forward,
                                        double scale);

  // rows [R, E]: hidden states of edges().source. weight [V, E]. Throws [edge_logprob].
  EdgeLogprob logprob_forward(const at::Tensor& rows,
                              const at::Tensor& weight,
                              double temperature,
                              bool with_entropy) const;

  struct LogprobGradients {
    at::Tensor rows;    // [R, E] dtype of rows
    at::Tensor weight;  // [V, E] fp32 (fp64 for fp64)
  };

  // grad_logprob [X], grad_entropy [R] or undefined, in the dtype of the forward's results.
  LogprobGradients logprob_backward(const at::Tensor& rows,
                                    const at::Tensor& weight,
                                    const EdgeLogprob& forward,
                                    const at::Tensor& grad_logprob,
                                    const at::Tensor& grad_entropy,
                                    double temperature) const;

 private:
  TrieAttention& context(const ComputeOptions& options);

  trie::Trie trie_;
  trie::LogicalTokens logical_;
  trie::Edges edges_;
  std::mutex mutex_;  // guards what follows
  ComputeOptions options_;
  std::unique_ptr<TrieAttention> attention_;  // of options_; made by the first call
};

}  // namespace banyan::ops
