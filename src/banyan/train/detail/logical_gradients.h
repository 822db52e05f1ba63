// The gradients of a walk's losses, one per logical token, and their sums per edge and head row of
// a block.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/train/walk.h"
#include "banyan/trie/plan.h"

namespace banyan::train::detail {

class LogicalGradients {
 public:
  explicit LogicalGradients(const trie::Plan& plan);

  // Each sample once.
  void take(const std::vector<int32_t>& samples, const TokenGradients& gradients);
  // Logical tokens of a block whose gradient has not come yet.
  int64_t pending(int32_t block) const { return pending_[block]; }

  // out[t] = sum over the block's logical tokens whose edge (or head row) is t, fp64, added in
  // ascending order of value: it depends neither on the order of the samples nor on the plan.
  at::Tensor of_values(int32_t block, bool on_edges) const { return sum(block, value_, on_edges); }
  // Of rows; undefined if no loss has given any.
  at::Tensor of_entropies(int32_t block) const;

 private:
  at::Tensor sum(int32_t block, const at::Tensor& gradient, bool on_edges) const;

  const trie::Plan& plan_;
  // Logical tokens of each block in the order of the batch: [offsets[b], offsets[b + 1]) of tokens.
  std::vector<int64_t> offsets_;
  std::vector<int64_t> tokens_;
  std::vector<int64_t> pending_;  // [blocks]
  at::Tensor value_;              // [all logical tokens] fp64
  at::Tensor entropy_;            // likewise, or undefined
};

}  // namespace banyan::train::detail
