// Exact cuts of small tries. The cutter looks at few ways to open a chain, which is next to best on
// average but now and then a block too many, and that is much where there are only three. Here all
// plans are tried whose blocks are all open or all closed with cuts at the ends of segments.
#pragma once

#include "banyan/trie/detail/cutter.h"

namespace banyan::trie::detail {

// Replaces `list` by the best plan of that class if it costs less. Does nothing where there are
// more than 16 samples or options.carry is not auto; gives up after a fixed amount of work.
void search_small(const ForkTree& tree, const PlanOptions& options, CutList& list);

}  // namespace banyan::trie::detail
