#include "banyan/rollout/prefix_tree.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::rollout {
namespace {

// FNV-1a over parent and tokens: only a way to find candidates.
uint64_t hash_of(int32_t parent, const int32_t* tokens, int32_t count) {
  uint64_t hash = 14695981039346656037ull;
  const auto mix = [&](int32_t value) {
    hash = (hash ^ static_cast<uint32_t>(value)) * 1099511628211ull;
  };
  mix(parent);
  for (int32_t i = 0; i < count; ++i) mix(tokens[i]);
  return hash;
}

}  // namespace

int32_t PrefixTree::find_child(int32_t parent,
                               const int32_t* tokens,
                               int32_t count,
                               uint64_t hash) const {
  const auto [begin, end] = by_hash_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const Node& node = nodes_[it->second];
    if (node.parent == parent &&
        std::equal(node.tokens.begin(), node.tokens.end(), tokens, tokens + count)) {
      return it->second;
    }
  }
  return -1;
}

PrefixTree::Path PrefixTree::insert(const std::vector<int32_t>& prompt) {
  Path path;
  int32_t parent = -1;
  const int32_t length = static_cast<int32_t>(prompt.size());
  for (int32_t first = 0; first < length; first += kPageTokens) {
    const int32_t count = std::min(kPageTokens, length - first);
    const int32_t* tokens = prompt.data() + first;
    const uint64_t hash = hash_of(parent, tokens, count);
    int32_t index = share_ ? find_child(parent, tokens, count, hash) : -1;
    if (index < 0) {
      index = num_nodes();
      nodes_.push_back({.parent = parent,
                        .first_position = first,
                        .page = -1,
                        .computed = 0,
                        .num_users = 0,
                        .tokens = {tokens, tokens + count}});
      if (share_) by_hash_.emplace(hash, index);
    }
    ++nodes_[index].num_users;
    path.push_back(index);
    parent = index;
  }
  return path;
}

void PrefixTree::free_page(Node& node) {
  pool_.release(node.page);
  node.page = -1;
  node.computed = 0;
}

void PrefixTree::leave(const Path& path) {
  for (auto it = path.rbegin(); it != path.rend(); ++it) {
    Node& node = nodes_[*it];
    if (--node.num_users == 0 && node.page >= 0) {
      BANYAN_ASSERT(is_cached(node), "prefix tree: a page without users is held");
      free_page(node);
    }
  }
}

bool PrefixTree::hold(const Path& path, int32_t from) {
  const int32_t length = static_cast<int32_t>(path.size());
  int32_t resident = from;  // nodes with a page come first on a path
  while (resident < length && nodes_[path[resident]].page >= 0) {
    pool_.share(nodes_[path[resident++]].page);  // held: eviction below passes them by
  }
  while (pool_.num_free() < length - resident) {
    if (!evict_one()) {
      drop(path, from, resident);
      return false;
    }
  }
  for (int32_t i = resident; i < length; ++i) {
    nodes_[path[i]].page = pool_.take();  // the tree's own hold
    pool_.share(nodes_[path[i]].page);
  }
  return true;
}

void PrefixTree::drop(const Path& path, int32_t from, int32_t to) {
  for (int32_t i = from; i < to; ++i) pool_.release(nodes_[path[i]].page);
}

void PrefixTree::forget_tail(const Path& path) {
  Node& node = nodes_[path.back()];
  BANYAN_ASSERT(node.num_users == 1, "prefix tree: forgot a tail that others use");
  pool_.release(node.page);  // the caller's hold
  free_page(node);
}

bool PrefixTree::evict_one() {
  Node* deepest = nullptr;
  for (Node& node : nodes_) {
    if (is_cached(node) && (!deepest || node.first_position >= deepest->first_position)) {
      deepest = &node;
    }
  }
  if (!deepest) return false;
  free_page(*deepest);
  return true;
}

int32_t PrefixTree::num_cached() const {
  return static_cast<int32_t>(
      std::count_if(nodes_.begin(), nodes_.end(), [&](const Node& n) { return is_cached(n); }));
}

int32_t PrefixTree::cost_of_hold(const Path& path, int32_t from) const {
  int32_t pages = 0;
  for (size_t i = from; i < path.size(); ++i) {
    const Node& node = nodes_[path[i]];
    pages += node.page < 0 || is_cached(node);
  }
  return pages;
}

int32_t PrefixTree::computed(const Path& path) const {
  int32_t positions = 0;
  for (const int32_t index : path) {
    const Node& node = nodes_[index];
    positions += node.computed;
    if (node.computed < static_cast<int32_t>(node.tokens.size())) break;
  }
  return positions;
}

void PrefixTree::advance(const Path& path, int32_t end) {
  for (const int32_t index : path) {
    Node& node = nodes_[index];
    if (node.first_position >= end) break;
    BANYAN_ASSERT(node.page >= 0, "prefix tree: computed a node without a page");
    node.computed = std::max(node.computed, std::min(end, node.end()) - node.first_position);
  }
}

}  // namespace banyan::rollout
