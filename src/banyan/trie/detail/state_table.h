// What the cutter asks of its states (see cutter.h) before they are priced, and the answers.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/trie/detail/cut_states.h"

namespace banyan::trie::detail {

// The cheapest ways from sample `first` of a state on: by itself, and if the last block counts by
// its fill only (so that samples behind it may join it).
struct Asked {
  int32_t first = 0;
  Stretch best[2] = {};
};

struct Priced {
  CutState state;  // first: the smallest of all asked
  std::vector<Asked> asked;
};

class StateTable {
 public:
  explicit StateTable(size_t num_nodes) : requests_(num_nodes), states_(num_nodes) {}

  void request(const CutState& wanted) { requests_[wanted.node].push_back(wanted); }

  // Groups what was asked of node v at depths above `depth` into states, rounding retained tokens
  // up where there are too many amounts. States at smaller depths stay.
  void settle(int32_t v, int32_t depth);
  void forget_requests(int32_t v) { requests_[v] = {}; }
  size_t num_requests(int32_t v) const { return requests_[v].size(); }

  // States of node v, ascending (depth, retained).
  std::vector<Priced>& of(int32_t v) { return states_[v]; }

  // The state that stands for `wanted`: the same or the next larger amount retained.
  const Priced& at(const CutState& wanted) const;
  const Asked& answer(const CutState& wanted) const;

 private:
  void group(int32_t v, size_t begin, size_t end, const std::vector<int64_t>& amounts);

  std::vector<std::vector<CutState>> requests_;  // per node
  std::vector<std::vector<Priced>> states_;      // per node
};

}  // namespace banyan::trie::detail
