// The order of the samples in a trie and how far neighbours agree: all that layout and cuts need to
// know.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/trie/cost_model.h"
#include "banyan/trie/trie.h"

namespace banyan::trie::detail {

// Samples sorted by path (token id, then position id, token by token), then uid. A path sorts
// before its extensions, so this is the depth-first order of the trie.
struct Order {
  std::vector<int32_t> samples;  // [S] indices into the batch
  std::vector<int32_t> shared;   // [S] tokens whose nodes sample i shares with sample i - 1 of this
                                 // order; shared[0] = 0
};

// Throws [trie] on an empty sample or on vectors of unequal length, naming the uid.
Order order_samples(const std::vector<Sample>& samples, const BuildOptions& options);

// Takes the trees apart whose sharing saves less than `margin` of their cost in tokens and pairs.
void unshare_trees(const std::vector<Sample>& samples,
                   const CostModel& cost,
                   double margin,
                   Order& order);

// Lays out samples [begin, end) of the order. sample_end follows the order, not the batch.
Trie pack(const std::vector<Sample>& samples, const Order& order, int32_t begin, int32_t end);

// Fills ancestor_offsets and ancestors from the segments.
void list_ancestors(Trie& trie);

}  // namespace banyan::trie::detail
