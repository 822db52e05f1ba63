// The token trie of a batch: samples that agree on a prefix share its tokens, so each unique token
// stands once in one packed row of T tokens (specification A1-A5; the layout is described there and
// repeated here).
//
// Nodes are tokens; equal keys (token id, position id) under the same parent are one node. A
// *segment* is a maximal chain of nodes that the same samples pass through. Segments are laid out
// depth first, children ordered by key, so that
//   * the ancestors of a token are the tokens of its ancestor segments plus the earlier ones of its
//   own: a
//     short list of contiguous packed ranges;
//   * the subtree of a token is the contiguous range [token, tout[token]).
// Example: samples [1 2 3], [1 2 4] pack to  tok 1 2 3 4   par -1 0 1 1   tout 4 4 3 4.
//
// Torch-free, integers only.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/sample.h"

namespace banyan::trie {

struct BuildOptions {
  bool share = true;           // false: nothing is merged; every sample is a tree of its own
  int32_t min_prefix_len = 1;  // leading tokens two samples must share before they merge at all
  int32_t min_group_size = 2;  // samples a node needs before it is shared
};

struct Range {
  int32_t begin = 0;
  int32_t end = 0;
  friend bool operator==(const Range&, const Range&) = default;
};

struct Segment {
  int32_t begin = 0;  // packed tokens [begin, end)
  int32_t end = 0;
  int32_t tout = 0;         // end of the subtree
  int32_t parent = -1;      // segment, or -1 at a root
  int32_t num_samples = 0;  // m: samples that pass through
  int32_t depth = 0;        // number of ancestors of token `begin` (its position on the path grid)
  friend bool operator==(const Segment&, const Segment&) = default;
};

struct Trie {
  // Per packed token, length T.
  std::vector<int32_t> tok;   // token id
  std::vector<int32_t> pos;   // position id (what RoPE reads)
  std::vector<int32_t> dep;   // number of ancestors
  std::vector<int32_t> par;   // packed index of the parent, -1 at a root
  std::vector<int32_t> tout;  // end of the subtree
  std::vector<int32_t> seg;   // segment

  std::vector<Segment> segments;  // in packed order

  // CSR over segments: packed ranges of the ancestor segments, root first, own segment not
  // included.
  std::vector<int32_t> ancestor_offsets;  // N + 1
  std::vector<Range> ancestors;

  // Per sample, in input order: the last token of its path and the segment that holds it.
  std::vector<int32_t> sample_end;

  int64_t num_logical = 0;  // T0: tokens of all samples
  int32_t num_tokens() const { return static_cast<int32_t>(tok.size()); }  // T1
  int32_t num_segments() const { return static_cast<int32_t>(segments.size()); }

  // Packed indices of the tokens of sample s, first to last. O(path).
  std::vector<int32_t> path(int32_t sample) const;
  // Sum over tokens of (dep + 1): query-key pairs of causal attention.
  int64_t num_pairs() const;
};

// Merges equal prefixes. The result depends on the set of samples alone, not on their order
// (sample_end follows the input order). O(T0 log S) time. Throws [trie] on an empty sample or on
// vectors of unequal length, naming the sample's uid.
Trie build(const std::vector<Sample>& samples, const BuildOptions& options = {});

}  // namespace banyan::trie
