#include "banyan/trie/explain.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "banyan/core/error.h"
#include "banyan/trie/detail/explain_tree.h"
#include "banyan/trie/sharing_view.h"

namespace banyan::trie {
namespace {

using ::banyan::detail::concat;
using detail::Tree;

std::string one_decimal(double value) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << value;
  return out.str();
}

// "1 row", "2 rows".
std::string counted(int64_t count, const char* noun) {
  return concat(count, " ", noun, count == 1 ? "" : "s");
}

// Adds lines up to a limit, then says how many are left.
class Lines {
 public:
  explicit Lines(int64_t limit) : limit_(limit) {}
  void add(const std::string& line) {
    if (limit_ == 0 || count_ < limit_) text_ += line + "\n";
    ++count_;
  }
  std::string take() const {
    if (limit_ == 0 || count_ <= limit_) return text_;
    return concat(text_, "... ", count_ - limit_, " more\n");
  }

 private:
  int64_t limit_;
  int64_t count_ = 0;
  std::string text_;
};

std::string counts(const Tree& tree, size_t rows) {
  const Trie& trie = tree.trie;
  const int64_t saved = trie.num_logical - trie.num_tokens();
  const auto forks = std::count_if(
      tree.children.begin(), tree.children.end(), [](const auto& c) { return c.size() > 1; });
  const int32_t deepest =
      trie.dep.empty() ? 0 : *std::max_element(trie.dep.begin(), trie.dep.end()) + 1;
  int64_t dense_pairs = 0;
  for (const int32_t end : trie.sample_end) {
    const int64_t length = trie.dep[end] + 1;
    dense_pairs += length * (length + 1) / 2;
  }
  const double percent =
      trie.num_logical == 0 ? 0.0 : 100.0 * static_cast<double>(saved) / trie.num_logical;
  const double ratio =
      trie.num_tokens() == 0 ? 1.0 : static_cast<double>(trie.num_logical) / trie.num_tokens();
  std::ostringstream out;
  out << rows << " rows, " << trie.num_logical << " tokens, " << trie.num_tokens()
      << " unique: " << saved << " saved (" << one_decimal(percent) << " %), " << std::fixed
      << std::setprecision(2) << ratio << " times fewer\n"
      << trie.num_segments() << " segments, " << forks << " forks, " << tree.roots.size()
      << " roots, longest path " << deepest << " tokens; query-key pairs " << trie.num_pairs()
      << " of " << dense_pairs << "\n";
  return out.str();
}

std::string segment_line(const Tree& tree, int32_t s, const TokenTexts& texts) {
  const Segment& segment = tree.trie.segments[s];
  std::ostringstream out;
  out << counted(segment.end - segment.begin, "token") << " from " << segment.depth << ", "
      << counted(segment.num_samples, "row") << ": " << detail::label(tree, s, texts);
  if (!tree.ends[s].empty()) {
    out << "  <-";
    for (const int32_t row : tree.ends[s]) out << " row " << row;
  }
  return out.str();
}

// Depth first with an explicit stack: a tree may be as deep as it has segments.
std::string draw(const Tree& tree, const TokenTexts& texts, int64_t limit) {
  struct Item {
    int32_t segment;
    std::string indent;
    bool is_last;
    bool is_root;
  };
  Lines lines(limit);
  std::vector<Item> stack;
  for (auto root = tree.roots.rbegin(); root != tree.roots.rend(); ++root) {
    stack.push_back({*root, "", true, true});
  }
  while (!stack.empty()) {
    const Item item = stack.back();
    stack.pop_back();
    const char* branch = item.is_root ? "" : item.is_last ? "└─ " : "├─ ";
    lines.add(concat(item.indent, branch, segment_line(tree, item.segment, texts)));
    const char* below = item.is_root ? "" : item.is_last ? "   " : "│  ";
    const std::vector<int32_t>& children = tree.children[item.segment];
    for (size_t i = children.size(); i > 0; --i) {
      stack.push_back({children[i - 1], item.indent + below, i == children.size(), false});
    }
  }
  return lines.take();
}

std::string list_groups(const Detection& found, int64_t limit) {
  Lines lines(limit);
  for (const SharingGroup& group : found.groups) {
    std::string members;
    for (const int32_t row : group.member_indices) {
      if (row != group.provider_index) members += concat(members.empty() ? "" : ", ", row);
    }
    lines.add(concat("group ",
                     group.group_id,
                     ": row ",
                     group.provider_index,
                     " provides ",
                     group.prefix_len,
                     " tokens to ",
                     group.member_indices.size() > 2 ? "rows " : "row ",
                     members));
  }
  if (found.groups.empty()) lines.add("none");
  return lines.take();
}

std::string list_rows(const SharingPlan& plan, int64_t limit) {
  Lines lines(limit == 0 ? 0 : limit + 1);
  const auto line = [&](const auto&... cells) {
    std::ostringstream out;
    ((out << std::setw(9) << cells), ...);
    lines.add(out.str());
  };
  line("row", "tokens", "provider", "reuses", "group", "keeps", "runs");
  for (int32_t row = 0; row < plan.batch_size; ++row) {
    const Range keep = plan.input_keep_ranges[row];
    const bool reuses = plan.is_reuser(row);
    line(row,
         plan.original_lengths[row],
         reuses ? std::to_string(plan.provider_index[row]) : "-",
         plan.prefix_lens[row],
         plan.group_ids[row] < 0 ? "-" : std::to_string(plan.group_ids[row]),
         concat(keep.begin, "-", keep.end),
         plan.kept_lengths_q[row]);
  }
  return lines.take();
}

}  // namespace

std::string explain_text(const std::vector<Sample>& samples,
                         const ExplainOptions& options,
                         const TokenTexts& texts) {
  const Detection found = make_detector(options.detector, options.detect)->detect(samples);
  const SharingPlan plan = make_sharing_plan(samples, found, 1, 1);
  const Tree tree = detail::make_tree(samples, options.detect);
  std::ostringstream out;
  out << counts(tree, samples.size()) << "\ntree\n"
      << draw(tree, texts, options.max_lines) << "\ngroups (" << options.detector << ")\n"
      << list_groups(found, options.max_lines) << "\nrows\n"
      << list_rows(plan, options.max_lines) << "\nkept " << plan.cu_seqlens_q.back() << " of "
      << plan.cu_seqlens_kv.back() << " tokens, " << plan.reuse_specs.size() << " of "
      << plan.batch_size << " rows reuse\n";
  return out.str();
}

}  // namespace banyan::trie
