// Ranks that compute the passes over equal samples together (context parallel).
#pragma once

#include <cstdint>

#include "banyan/parallel/collectives.h"

namespace banyan::train {

// How the ranks of a group share a pass over equal samples.
enum class ContextKind : uint8_t {
  kRanges,  // each runs its blocks, as many at one time as ranks (train/context_parallel.h); the
            // plan is trie::context_plan's
  kHeads,   // each has a part of every block's tokens, and in attention of the heads
            // (train/ulysses.h)
};

struct ContextGroup {
  parallel::Collectives* ranks = nullptr;  // null: this process alone
  ContextKind kind = ContextKind::kRanges;

  bool is_alone() const { return parallel::is_alone(ranks); }
};

}  // namespace banyan::train
