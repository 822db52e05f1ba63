#include <algorithm>
#include <iomanip>
#include <iterator>
#include <sstream>

#include "banyan/core/error.h"
#include "banyan/trie/detail/explain_tree.h"
#include "banyan/trie/explain.h"

namespace banyan::trie {
namespace {

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// Where each segment stands: first line and number of lines, one line per row.
struct Lanes {
  std::vector<int32_t> top;
  std::vector<int32_t> height;
  int32_t total = 0;
};

Lanes lanes_of(const detail::Tree& tree) {
  Lanes lanes;
  const size_t size = tree.trie.segments.size();
  lanes.top.resize(size);
  for (const Segment& segment : tree.trie.segments) lanes.height.push_back(segment.num_samples);
  for (const int32_t root : tree.roots) {
    lanes.top[root] = lanes.total;
    lanes.total += lanes.height[root];
  }
  for (size_t s = 0; s < size; ++s) {  // parents stand before their children
    // A row that ends inside another's path has a line of its own, empty behind its end.
    int32_t at = lanes.top[s] + static_cast<int32_t>(tree.ends[s].size());
    for (const int32_t child : tree.children[s]) {
      lanes.top[child] = at;
      at += lanes.height[child];
    }
  }
  return lanes;
}

}  // namespace

std::string explain_svg(const std::vector<Sample>& samples,
                        const ExplainOptions& options,
                        const TokenTexts& texts) {
  constexpr double kWidth = 900.0, kMargin = 12.0, kHead = 34.0, kGap = 1.0;
  constexpr const char* kColours[] = {"#2f6f4f", "#3f8fbf", "#d9822b", "#8e6bb0", "#5b8f3a"};
  const detail::Tree tree = detail::make_tree(samples, options.detect);
  const Trie& trie = tree.trie;
  const Lanes lanes = lanes_of(tree);
  const int32_t deepest =
      trie.dep.empty() ? 1 : *std::max_element(trie.dep.begin(), trie.dep.end()) + 1;
  const double row_height = std::clamp(600.0 / std::max(1, lanes.total), 3.0, 24.0);
  const double scale = (kWidth - 2 * kMargin) / deepest;
  std::ostringstream out;
  out << std::fixed << std::setprecision(1)
      << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kWidth << " "
      << kHead + lanes.total * row_height + kMargin
      << "\" font-family=\"sans-serif\" font-size=\"11\"><rect width=\"100%\" height=\"100%\" "
         "fill=\"#fff\"/>\n<text x=\""
      << kMargin << "\" y=\"21\" font-weight=\"bold\">" << samples.size() << " rows, "
      << trie.num_logical << " tokens, " << trie.num_tokens() << " computed</text>\n";
  for (size_t s = 0; s < trie.segments.size(); ++s) {
    const Segment& segment = trie.segments[s];
    const double x = kMargin + segment.depth * scale;
    const double width = (segment.end - segment.begin) * scale - kGap;
    const double y = kHead + lanes.top[s] * row_height;
    const double tall = lanes.height[s] * row_height - kGap;
    size_t level = 0;
    for (int32_t p = segment.parent; p >= 0; p = trie.segments[p].parent) ++level;
    const std::string title =
        escaped(::banyan::detail::concat(segment.end - segment.begin,
                                         " tokens, ",
                                         segment.num_samples,
                                         " rows: ",
                                         detail::label(tree, static_cast<int32_t>(s), texts)));
    out << "<rect x=\"" << x << "\" y=\"" << y << "\" width=\"" << std::max(width, 0.5)
        << "\" height=\"" << std::max(tall, 0.5) << "\" rx=\"2\" fill=\""
        << kColours[level % std::size(kColours)] << "\"><title>" << title << "</title></rect>\n";
    const std::string count = std::to_string(segment.end - segment.begin);
    if (width > 7.0 * static_cast<double>(count.size()) + 6 && tall > 11.0) {
      out << "<text x=\"" << x + width / 2 << "\" y=\"" << y + tall / 2 + 4
          << "\" fill=\"#fff\" text-anchor=\"middle\">" << count << "</text>\n";
    }
  }
  out << "</svg>\n";
  return out.str();
}

}  // namespace banyan::trie
