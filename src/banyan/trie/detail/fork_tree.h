// The trie reduced to its forks, which is all that planning looks at: a node is a chain of tokens
// without a fork inside (samples may end along it), so there are at most 2 S nodes.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/sample.h"
#include "banyan/trie/detail/order.h"

namespace banyan::trie::detail {

struct ForkNode {
  int32_t start = 0;  // depth of its first token
  int32_t end = 0;    // one behind the depth of its last
  int32_t first = 0;  // samples [first, last) of the order pass through its first token;
  int32_t last = 0;   //   those that end along the chain stand first, shortest first
  int32_t parent = -1;
  int32_t next = 0;        // node behind its subtree, in depth-first order
  int32_t max_length = 0;  // tokens of the longest sample through it
};

class ForkTree {
 public:
  // `with_scored`: scored() will be asked.
  ForkTree(const std::vector<Sample>& samples, const Order& order, bool with_scored = false);

  // Depth first; node 0 is the virtual root (no token, all samples). Children of v: v + 1, then
  // `next` of each, while < nodes()[v].next.
  const std::vector<ForkNode>& nodes() const { return nodes_; }
  int32_t num_samples() const { return static_cast<int32_t>(lengths_.size()); }
  int32_t length(int32_t i) const { return lengths_[i]; }
  int32_t shared(int32_t i) const { return shared_[i]; }
  bool is_leaf(int32_t v) const { return nodes_[v].next == v + 1; }

  // Tokens of the trie of samples [a, b) of the order, a < b.
  int64_t tokens(int32_t a, int32_t b) const { return sums_[b] - sums_[a] + shared_[a]; }
  // Scored tokens of sample i at positions (from, to]: head rows of its tokens at depths [from,
  // to).
  int64_t scored(int32_t i, int64_t from, int64_t to) const;
  // First sample of node v with more than `depth` tokens, or its `last`. O(log S).
  int32_t first_longer(int32_t v, int32_t depth) const;

 private:
  void count_scored(const std::vector<Sample>& samples, const Order& order);

  std::vector<int32_t> lengths_;
  std::vector<int32_t> shared_;
  std::vector<int32_t> scored_;  // [T0 + S] per sample: scored tokens in front of each position
  std::vector<int64_t> scored_begin_;  // [S] where a sample's counts begin
  std::vector<int64_t> sums_;          // [S + 1] running sum of length - shared
  std::vector<ForkNode> nodes_;
};

}  // namespace banyan::trie::detail
