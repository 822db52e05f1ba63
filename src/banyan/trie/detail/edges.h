// edges_of without copies of the samples, for the blocks of a plan.
#pragma once

#include <vector>

#include "banyan/trie/plan.h"

namespace banyan::trie::detail {

Edges edges_of(const Trie& trie, const std::vector<const Sample*>& samples);

}  // namespace banyan::trie::detail
