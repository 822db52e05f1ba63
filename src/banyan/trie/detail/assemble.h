// From a decision (which samples share how much, where the packed order is cut) to a plan.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/trie/detail/order.h"
#include "banyan/trie/plan.h"

namespace banyan::trie::detail {

// Block i holds packed tokens [ends[i - 1], ends[i]) of the trie that `order` describes. A trunk is
// replayed by an order that merges less than the keys would allow.
struct Cuts {
  Order order;
  std::vector<int32_t> ends;          // ascending; the last one is T
  std::vector<CarryPolicy> policies;  // per block; of a closed block without meaning
};

// Blocks, entries, logical tokens and counts; num_unique and warnings are the caller's.
// O(T + sum over blocks of their carried path).
Plan assemble(const std::vector<Sample>& samples, const Cuts& cuts, const PlanOptions& options);

// Last block with descendants of block i's tokens (A12 rule 2), from the last block that each one
// offers tokens to directly (i itself if to none).
std::vector<int32_t> closing_blocks(const std::vector<int32_t>& last_consumer);

// F, L of every block in order; B as soon as the block closes, ties in reverse forward order.
std::vector<Entry> order_entries(const std::vector<Block>& blocks, bool for_backward);

}  // namespace banyan::trie::detail
