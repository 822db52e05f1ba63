// Whether sharing pays (specification A14, sharing.mode=auto).
#pragma once

#include <vector>

#include "banyan/core/sample.h"
#include "banyan/trie/plan.h"

namespace banyan::trie {

// True iff the plan of the trie costs at most (1 - margin) of the plan of the samples apart, both
// under `options` (whose build.share does not matter), by options.cost. False where nothing is
// shared. Costs two plans. Decide once per batch, so that all of its passes agree.
bool sharing_pays(const std::vector<Sample>& samples, const PlanOptions& options, double margin);

}  // namespace banyan::trie
