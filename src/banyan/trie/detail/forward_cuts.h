// Where to cut for a pass without gradients. Nothing is retained, so blocks may mix open and closed
// tokens and no token is computed twice: any cut of the packed order will do, and the cheapest cuts
// fall where little is carried across.
#pragma once

#include "banyan/trie/detail/cutter.h"

namespace banyan::trie::detail {

// Blocks in packed order, none of them replaying. O(nodes + 16 tokens / budget) places are tried.
CutList cut_forward(const ForkTree& tree, const PlanOptions& options);

}  // namespace banyan::trie::detail
