// Ulysses over tries (Jacobs et al., "DeepSpeed Ulysses", 2023): the ranks of a group share the own
// tokens of each block, neighbouring ones to each, for everything but attention; there each has all
// tokens and a part of the heads:
//   [t, H, D] of own tokens --all_to_all--> [T, H / n, D] of own heads, attention over the trie,
//   and back
// What a block carries is carried per head, so nothing else is exchanged. Where there are fewer key
// heads than ranks, those that read one have copies of it, whose gradients are added in rank order.
//
// Traffic per layer and rank, n ranks, t own tokens of T, h = H / n, k = K / n or 1 heads:
//   forward    t (n - 1) (h + 2 k) D + (T - t) h D numbers, and (T - t) h of the log-sum-exps
//   backward   t (n - 1) (3 h + 2 k) D + (T - t) (h + 2 k) D, and t (n - 1) h
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "banyan/core/attention_context.h"
#include "banyan/parallel/collectives.h"
#include "banyan/trie/plan.h"

namespace banyan::train {

// Throws [config] naming `key` unless `ranks` divide the query heads, and divide the key heads or
// are a multiple of them.
void check_ulysses(const char* key, int64_t ranks, int64_t heads, int64_t kv_heads);

// What each rank has of a block, rank r [bounds[r], bounds[r + 1]): of T own tokens
// [T r / n, T (r + 1) / n), and the head rows and edges of these.
struct BlockShares {
  std::vector<int64_t> token;  // [n + 1]
  std::vector<int64_t> row;
  std::vector<int64_t> edge;
};
BlockShares shares_of(const trie::Block& block, int64_t ranks);

// A rank's own tokens with their head rows, as a block that carries nothing: what body and head run
// on. Attention needs the whole block. Where it has none, one token of padding, so that it makes
// the calls that the others wait for.
trie::Block part_of(const trie::Block& block, const BlockShares& shares, int64_t rank);

// The attention of one rank: own tokens in and out, zeros for padding behind them. `inner` is that
// of the whole block.
class UlyssesAttention final : public AttentionContext {
 public:
  UlyssesAttention(std::unique_ptr<AttentionContext> inner,
                   parallel::Collectives& ranks,
                   const BlockShares& shares);

  // (all)
  at::Tensor forward(int64_t layer,
                     const at::Tensor& q,
                     const at::Tensor& k,
                     const at::Tensor& v,
                     double scale,
                     at::Tensor* lse) override;
  // (all)
  AttentionGradients backward(int64_t layer,
                              const at::Tensor& grad_out,
                              const at::Tensor& q,
                              const at::Tensor& k,
                              const at::Tensor& v,
                              const at::Tensor& out,
                              const at::Tensor& lse,
                              double scale) override;
  // Nobody passes through padding.
  at::Tensor multiplicity() const override;

 private:
  at::Tensor own(const at::Tensor& x) const { return x.narrow(0, 0, counts_[ranks_.rank()]); }
  // Own tokens, all heads -> all tokens, own heads; and back, [n, t, ...] of each rank's heads.
  at::Tensor to_heads(const std::vector<at::Tensor>& parts) const;
  at::Tensor to_tokens(const at::Tensor& x) const;
  std::vector<at::Tensor> heads_for(int64_t rank,
                                    const at::Tensor& q,
                                    const at::Tensor& k,
                                    const at::Tensor& v) const;

  std::unique_ptr<AttentionContext> inner_;
  parallel::Collectives& ranks_;
  std::vector<int64_t> counts_;  // tokens of each rank
  int64_t first_;                // own token in the block
};

}  // namespace banyan::train
