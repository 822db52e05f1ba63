// What one rank of a context-parallel group has of a walk: which blocks run at one time, its part
// of them, and how attention and the numbers of the heads get from rank to rank. One process has
// all of every block, and nothing moves.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "banyan/core/attention_context.h"
#include "banyan/models/causal_lm.h"
#include "banyan/ops/carry.h"
#include "banyan/parallel/collectives.h"
#include "banyan/train/context_group.h"
#include "banyan/train/context_parallel.h"
#include "banyan/train/ulysses.h"
#include "banyan/trie/plan.h"

namespace banyan::train {

class ContextPass {
 public:
  using StoreOf = std::function<ops::CarryStore*(int32_t block)>;

  // The stores of the walk's blocks; borrowed, as everything is.
  ContextPass(const ContextGroup& group,
              const trie::Plan& plan,
              models::CausalLM& model,
              StoreOf store_of);

  // Blocks [begin, end) of a round; own: this rank's, or -1. Rounds are blocks unless kRanges.
  int32_t num_rounds() const { return (num_blocks_ + width_ - 1) / width_; }
  int32_t round_of(int32_t block) const { return block / width_; }
  int32_t begin(int32_t round) const { return round * width_; }
  int32_t end(int32_t round) const { return std::min((round + 1) * width_, num_blocks_); }
  int32_t own(int32_t round) const;

  // A round whose blocks offer their keys themselves (no CarryStore of TrieAttention).
  bool offers() const { return width_ > 1; }
  // What body and head of the own block run on.
  const trie::Block& part(int32_t block) const;
  // True where this rank has no block in a round: it only takes part in what is exchanged.
  bool is_idle(int32_t round) const { return own(round) < 0; }
  // Some rank is, in some round.
  bool has_idle() const { return num_blocks_ % width_ != 0; }
  // The part's places of numbers of the whole block's edges or rows.
  at::Tensor of_part(int32_t block, const at::Tensor& numbers, bool on_edges) const;

  // (all) The attention of this rank in a round, around that of its block.
  std::unique_ptr<AttentionContext> around(int32_t round, std::unique_ptr<AttentionContext> inner);
  // (all) In place of the forward or backward of an idle rank, which uses the same units.
  void idle_forward(int32_t round, int64_t chunk);
  void idle_backward(int32_t round, int64_t chunk);

  // (all) Numbers of the own part -> those of every block of the round, whole.
  std::vector<at::Tensor> tell(int32_t round, const at::Tensor& own, bool on_edges) const;
  bool is_alone() const { return ranks_ == nullptr; }

 private:
  bool by_heads() const { return ranks_ != nullptr && width_ == 1; }
  std::shared_ptr<RoundExchange> exchange_of(int32_t round) const;
  at::Tensor no_keys() const;

  parallel::Collectives* ranks_;
  const trie::Plan& plan_;
  models::CausalLM& model_;
  StoreOf store_of_;
  int32_t num_blocks_;
  int32_t width_ = 1;
  // kHeads, by block.
  std::vector<BlockShares> shares_;
  std::vector<trie::Block> parts_;  // this rank's
};

}  // namespace banyan::train
