// Where to cut the trie of a batch for a pass with gradients, at the least modelled cost.
//
// Blocks are all open (a chain of tokens above a fork) or all closed (a run of neighbouring
// samples, each from the carried depth on). Walking the trie depth first, what has been decided
// above a place is one *state*: node v whose chain is carried down to depth c, and R retained
// tokens that are alive meanwhile. The samples behind it are then an interval, and suffix by suffix
//   h(j) = min of  block + copy of [c, shared(j)) + h(i)     closed run [j, i) within budget - R
//                  chain to fork w + g(w, R') + h(last(w))   w below v, too big for one block
// with g = h at the first sample of the state (w, R'). A chain is retained (R' = R + its length),
// recomputed (R' = R), split into both, or not made at all: then every closed run below copies it
// (replay). Forks that a chain passes may take their trunk from it as well (chain_options.h). The
// closed block at the end of g may also take samples that follow it higher up; since it pays to end
// with a small block then, every state knows two ways: the cheapest, and the cheapest if its last
// block counts by its fill. h runs over samples outside big subtrees far below only, and states are
// few per node, so the work is O(samples x levels x states).
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/trie/detail/fork_tree.h"
#include "banyan/trie/plan.h"

namespace banyan::trie::detail {

// One block in the packed order of the trie it belongs to.
struct CutBlock {
  int32_t sample = 0;    // first sample of the order whose tokens it holds
  int32_t carried = 0;   // depth from which on it computes that sample's tokens
  int64_t tokens = 0;    // own ones
  int64_t retained = 0;  // tokens of retained blocks above it
  bool open = false;
  CarryPolicy policy = CarryPolicy::kRetain;  // of an open block
};

// Blocks in packed order. Their tokens beyond `carried` are not merged with those of the block in
// front. `forced` counts the blocks that break options.carry or max_samples_per_block because there
// is no other way within the budget.
struct CutList {
  std::vector<CutBlock> blocks;
  int64_t forced = 0;
  double cost = 0.0;  // modelled, without what the tokens of the uncut trie cost
};

CutList cut(const ForkTree& tree, const PlanOptions& options);

}  // namespace banyan::trie::detail
