// What sharing makes of a batch, for people: `banyan trie explain` and guides. The tree with its
// forks, who provides what to whom, what each row keeps, and a picture of it. Torch-free.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "banyan/trie/sharing_detect.h"

namespace banyan::trie {

struct ExplainOptions {
  DetectOptions detect;
  std::string detector = "trie";  // rule of the table of rows; the tree is always the trie's
  int64_t max_lines = 100;        // of the tree, of the groups and of the rows; 0 = all
};

// Text of a token by its id, for labels; ids without one print as numbers.
using TokenTexts = std::map<int32_t, std::string>;

// Counts, the tree, the groups and one line per row. Throws [trie] and [sharing] as build and
// make_detector.
std::string explain_text(const std::vector<Sample>& samples,
                         const ExplainOptions& options,
                         const TokenTexts& texts = {});

// An SVG picture of the tree: one box per segment, as wide as its tokens, from the position of its
// first token; a trunk is as tall as all rows that share it, so the area is what the batch costs
// without sharing and each box is computed once.
std::string explain_svg(const std::vector<Sample>& samples,
                        const ExplainOptions& options,
                        const TokenTexts& texts = {});

}  // namespace banyan::trie
