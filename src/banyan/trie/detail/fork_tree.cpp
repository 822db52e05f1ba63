// One pass over the order with the nodes of the current path on a stack. A sample that leaves the
// path inside a node splits it: the upper part stays, the lower one becomes its first child.
#include "banyan/trie/detail/fork_tree.h"

#include <algorithm>

namespace banyan::trie::detail {
namespace {

struct Link {
  ForkNode node;
  int32_t first_child = -1;
  int32_t last_child = -1;
  int32_t sibling = -1;
};

void add_child(std::vector<Link>& links, int32_t parent, int32_t child) {
  Link& link = links[parent];
  if (link.first_child < 0) {
    link.first_child = child;
  } else {
    links[link.last_child].sibling = child;
  }
  link.last_child = child;
}

// Nodes in depth-first order, `next` filled.
std::vector<ForkNode> flatten(const std::vector<Link>& links) {
  std::vector<ForkNode> nodes;
  std::vector<std::pair<int32_t, int32_t>> path;  // link, its place in nodes
  int32_t at = 0;
  while (at >= 0) {
    const int32_t parent = path.empty() ? -1 : path.back().second;
    path.emplace_back(at, static_cast<int32_t>(nodes.size()));
    nodes.push_back(links[at].node);
    nodes.back().parent = parent;
    at = links[at].first_child;
    while (at < 0 && !path.empty()) {
      const auto [link, place] = path.back();
      path.pop_back();
      nodes[place].next = static_cast<int32_t>(nodes.size());
      at = links[link].sibling;
    }
  }
  return nodes;
}

}  // namespace

ForkTree::ForkTree(const std::vector<Sample>& samples, const Order& order, bool with_scored)
    : shared_(order.shared), sums_(1, 0) {
  for (size_t i = 0; i < samples.size(); ++i) {
    lengths_.push_back(static_cast<int32_t>(samples[order.samples[i]].tokens.size()));
    sums_.push_back(sums_.back() + lengths_[i] - shared_[i]);
  }
  if (with_scored) count_scored(samples, order);
  std::vector<Link> links(1);  // the root
  std::vector<int32_t> path = {0};
  const auto close = [&](int32_t i) {
    links[path.back()].node.last = i;
    path.pop_back();
  };
  for (int32_t i = 0; i < num_samples(); ++i) {
    const int32_t kept = shared_[i];
    while (path.size() > 1 && links[path.back()].node.start >= kept) close(i);
    const int32_t top = path.back();
    if (kept < links[top].node.end) {
      const auto below = static_cast<int32_t>(links.size());
      Link lower = links[top];
      lower.node.start = kept;
      lower.node.last = i;
      lower.sibling = -1;
      const auto from = lengths_.begin();
      lower.node.first = static_cast<int32_t>(
          std::partition_point(
              from + lower.node.first, from + i, [&](int32_t n) { return n <= kept; }) -
          from);
      links.push_back(lower);
      links[top].node.end = kept;
      links[top].first_child = links[top].last_child = below;
    } else if (top != 0 && links[top].first_child < 0) {
      links[top].node.end = lengths_[i];  // the path only grew, or came twice
      continue;
    }
    const auto child = static_cast<int32_t>(links.size());
    links.push_back({{kept, lengths_[i], i}});
    add_child(links, top, child);
    path.push_back(child);
  }
  while (!path.empty()) close(num_samples());
  nodes_ = flatten(links);
  for (size_t v = nodes_.size(); v > 0; --v) {
    ForkNode& node = nodes_[v - 1];
    node.max_length = node.end;
    for (int32_t w = static_cast<int32_t>(v); w < node.next; w = nodes_[w].next) {
      node.max_length = std::max(node.max_length, nodes_[w].max_length);
    }
  }
}

void ForkTree::count_scored(const std::vector<Sample>& samples, const Order& order) {
  for (const int32_t s : order.samples) {
    const Sample& sample = samples[s];
    scored_begin_.push_back(static_cast<int64_t>(scored_.size()));
    int32_t count = 0;
    scored_.push_back(0);
    for (size_t t = 0; t < sample.tokens.size(); ++t) {
      count += sample.scored.empty() || sample.scored[t] != 0 ? 1 : 0;
      scored_.push_back(count);
    }
  }
}

int64_t ForkTree::scored(int32_t i, int64_t from, int64_t to) const {
  if (scored_begin_.empty() || to <= from) return 0;
  const int32_t* counts = scored_.data() + scored_begin_[i];
  return counts[std::min<int64_t>(to + 1, lengths_[i])] - counts[from + 1];
}

int32_t ForkTree::first_longer(int32_t v, int32_t depth) const {
  const auto begin = lengths_.begin();
  const auto at = std::partition_point(
      begin + nodes_[v].first, begin + nodes_[v].last, [&](int32_t n) { return n <= depth; });
  return static_cast<int32_t>(at - begin);
}

}  // namespace banyan::trie::detail
