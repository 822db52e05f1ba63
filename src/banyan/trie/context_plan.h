// A plan for the ranks of a context-parallel group, which compute one batch together: the packed
// order of its trie is cut into blocks of nearly equal cost, as many at one time as there are
// ranks. Round r is the blocks [r n, (r + 1) n) of n ranks; the i-th rank runs the i-th of them.
// What a block's tokens attend to outside of it is one path, as in any plan (trie/plan.h), whose
// tokens belong to ranks of the same round or of earlier ones. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/trie/plan.h"

namespace banyan::trie {

// Rounds as few as max_tokens_per_block tokens a rank and max_samples_per_block samples that end in
// a round allow. All forwards come first; with several rounds the activations of all but the last
// are dropped and computed again. The entries name rounds (Plan::blocks_per_round). options.carry
// and unshare_margin do not hold here. Throws as plan().
Plan context_plan(const std::vector<Sample>& samples, const PlanOptions& options, int64_t ranks);

}  // namespace banyan::trie
