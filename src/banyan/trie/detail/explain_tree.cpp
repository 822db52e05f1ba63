#include "banyan/trie/detail/explain_tree.h"

#include "banyan/core/error.h"

namespace banyan::trie::detail {
namespace {

// A label on one line of a terminal.
std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) >= 0x20) {
      out += c;
    }
  }
  return out;
}

constexpr int32_t kShownTokens = 8;  // of a segment's tokens, first ones and the last

}  // namespace

Tree make_tree(const std::vector<Sample>& samples, const DetectOptions& options) {
  Tree tree;
  tree.trie = build(samples,
                    {.share = true,
                     .min_prefix_len = options.min_prefix_len,
                     .min_group_size = options.min_group_size});
  tree.children.resize(tree.trie.segments.size());
  tree.ends.resize(tree.trie.segments.size());
  for (int32_t s = 0; s < tree.trie.num_segments(); ++s) {
    const int32_t parent = tree.trie.segments[s].parent;
    (parent < 0 ? tree.roots : tree.children[parent]).push_back(s);
  }
  for (size_t row = 0; row < samples.size(); ++row) {
    tree.ends[tree.trie.seg[tree.trie.sample_end[row]]].push_back(static_cast<int32_t>(row));
  }
  return tree;
}

std::string label(const Tree& tree, int32_t segment, const TokenTexts& texts) {
  const Trie& trie = tree.trie;
  const int32_t begin = trie.segments[segment].begin;
  const int32_t end = trie.segments[segment].end;
  std::string out;
  for (int32_t t = begin; t < end; ++t) {
    const int32_t index = t - begin;
    if (index == kShownTokens - 1 && end - t > 1) {
      out += texts.empty() ? " ..." : "…";
      t = end - 1;
    }
    const auto text = texts.find(trie.tok[t]);
    if (text != texts.end()) {
      out += text->second;
    } else {
      out += ::banyan::detail::concat(out.empty() ? "" : " ", trie.tok[t]);
    }
  }
  return printable(out);
}

}  // namespace banyan::trie::detail
