// Ranks that run every pass together, though each has blocks of its own: they agree on one order of
// passes (pass_order.h), and a rank idles through those that are not its own. As the order is
// agreed on before a pass, what follows from it, such as the schedule of a pipeline, is alike on
// all of them. Where weights are gathered pass by pass, parallel/fsdp.h does this itself.
#pragma once

#include <string>
#include <vector>

#include "banyan/parallel/collectives.h"
#include "banyan/trie/plan.h"

namespace banyan::parallel {

// In place of a block: a pass of others.
inline constexpr int32_t kIdle = -1;

// Letters of pass_order.h. Losses have none, and a recompute stands in front of its backward.
std::string passes_of(const std::vector<trie::Entry>& entries);

// `entries` in the common order of their passes and others': idle ones stand between them.
std::vector<trie::Entry> padded(const std::vector<trie::Entry>& entries, const std::string& order);

// (all) The entries of this rank, which may be none, padded: as many forwards, recomputes and
// backwards in the same order as on every other rank. Sends (n - 1) bytes a pass.
std::vector<trie::Entry> in_lockstep(const std::vector<trie::Entry>& entries, Collectives& ranks);

}  // namespace banyan::parallel
