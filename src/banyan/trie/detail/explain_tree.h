// The trie of a batch as a tree of segments, for text and picture (trie/explain.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/trie/explain.h"
#include "banyan/trie/trie.h"

namespace banyan::trie::detail {

struct Tree {
  Trie trie;
  std::vector<std::vector<int32_t>> children;  // per segment
  std::vector<int32_t> roots;
  std::vector<std::vector<int32_t>> ends;  // per segment: rows whose last token lies in it
};

Tree make_tree(const std::vector<Sample>& samples, const DetectOptions& options);

// The tokens of a segment on one line: texts where known, ids otherwise, the middle of a long one
// left out.
std::string label(const Tree& tree, int32_t segment, const TokenTexts& texts);

}  // namespace banyan::trie::detail
