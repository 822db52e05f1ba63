#include "banyan/rollout/memory/prefix_tree.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::rollout {
namespace {

constexpr int64_t kUnlisted = -1;  // generation of nodes that nobody else may match

// FNV-1a over parent and tokens: only a way to find candidates.
uint64_t hash_of(int32_t parent, const int32_t* tokens, int32_t count) {
  uint64_t hash = 14695981039346656037ull;
  const auto mix = [&](int32_t value) {
    hash = (hash ^ static_cast<uint32_t>(value)) * 1099511628211ull;
  };
  mix(parent);
  for (int32_t i = 0; i < count; ++i) mix(tokens[i]);
  return hash ^ (hash >> 29);
}

void erase_entry(std::unordered_multimap<uint64_t, int32_t>& map, uint64_t hash, int32_t index) {
  const auto [begin, end] = map.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    if (it->second == index) {
      map.erase(it);
      return;
    }
  }
}

}  // namespace

PrefixTree::PrefixTree(PagePool& pool, bool share) : pool_(pool), share_(share) {}

int32_t PrefixTree::num_nodes() const {
  return static_cast<int32_t>(nodes_.size() - free_nodes_.size()) - num_roots_;
}

// --- nodes ---

int32_t PrefixTree::make_node(int32_t parent,
                              const int32_t* tokens,
                              int32_t count,
                              int64_t generation) {
  int32_t index = static_cast<int32_t>(nodes_.size());
  if (free_nodes_.empty()) {
    nodes_.emplace_back();
  } else {
    index = free_nodes_.back();
    free_nodes_.pop_back();
  }
  Node& node = nodes_[index];
  node = {.parent = parent, .generation = generation, .tokens = std::move(node.tokens)};
  node.tokens.assign(tokens, tokens + count);
  if (parent < 0) {
    ++num_roots_;
    return index;
  }
  node.first_position = nodes_[parent].end();
  ++nodes_[parent].num_children;
  if (generation != kUnlisted) {
    by_tokens_.emplace(hash_of(parent, tokens, count), index);
  }
  return index;
}

int32_t PrefixTree::root_of(const std::string& salt, bool share) {
  if (!share) return make_node(-1, nullptr, 0, kUnlisted);
  const auto [entry, fresh] = roots_.try_emplace(salt, -1);
  if (fresh) {
    entry->second = make_node(-1, nullptr, 0, generation_);
    nodes_[entry->second].salt = &entry->first;
  }
  return entry->second;
}

// A node that no path, page or other node needs goes, and with it those above that only it needed.
void PrefixTree::remove_if_unused(int32_t index) {
  while (index >= 0) {
    Node& node = nodes_[index];
    if (node.page >= 0 || node.num_users > 0 || node.num_children > 0) return;
    const int32_t parent = node.parent;
    if (node.generation == generation_) {
      const int32_t count = static_cast<int32_t>(node.tokens.size());
      if (parent < 0) {
        roots_.erase(*node.salt);
      } else {
        erase_entry(by_tokens_, hash_of(parent, node.tokens.data(), count), index);
      }
    }
    if (parent < 0) {
      --num_roots_;
    } else {
      --nodes_[parent].num_children;
    }
    free_nodes_.push_back(index);
    index = parent;
  }
}

int32_t PrefixTree::find_child(int32_t parent, const int32_t* tokens, int32_t count) const {
  const auto [begin, end] = by_tokens_.equal_range(hash_of(parent, tokens, count));
  for (auto it = begin; it != end; ++it) {
    const Node& node = nodes_[it->second];
    if (node.parent == parent &&
        std::equal(node.tokens.begin(), node.tokens.end(), tokens, tokens + count)) {
      return it->second;
    }
  }
  return -1;
}

// A computed page below `parent` that begins with the most of `tokens`, at least kMinCopiedTokens.
// Of many, those that got their page last are looked at.
int32_t PrefixTree::find_similar(int32_t parent,
                                 const std::vector<int32_t>& tokens,
                                 int32_t* count) const {
  constexpr int32_t kMaxCandidates = 64;
  *count = kMinCopiedTokens - 1;
  if (static_cast<int32_t>(tokens.size()) < kMinCopiedTokens) return -1;
  const auto head = by_opening_.find(hash_of(parent, tokens.data(), kMinCopiedTokens));
  if (head == by_opening_.end()) return -1;
  int32_t found = -1;
  int32_t index = head->second;
  for (int32_t tried = 0; index >= 0 && tried < kMaxCandidates; ++tried) {
    const Node& node = nodes_[index];
    const int32_t most = std::min(node.computed, static_cast<int32_t>(tokens.size()));
    int32_t equal = 0;
    while (equal < most && node.tokens[equal] == tokens[equal]) ++equal;
    if (node.parent == parent && equal > *count) {
      *count = equal;
      found = index;
    }
    index = node.next_alike;
  }
  return found;
}

void PrefixTree::list_opening(int32_t index) {
  Node& node = nodes_[index];
  if (node.generation != generation_ ||
      static_cast<int32_t>(node.tokens.size()) < kMinCopiedTokens) {
    return;
  }
  const uint64_t hash = hash_of(node.parent, node.tokens.data(), kMinCopiedTokens);
  const auto [head, fresh] = by_opening_.try_emplace(hash, -1);
  node.next_alike = head->second;
  node.previous_alike = -1;
  if (node.next_alike >= 0) nodes_[node.next_alike].previous_alike = index;
  head->second = index;
  node.is_listed = true;
}

void PrefixTree::unlist_opening(int32_t index) {
  Node& node = nodes_[index];
  // A new generation has emptied the lists.
  if (!node.is_listed || node.generation != generation_) return;
  node.is_listed = false;
  if (node.next_alike >= 0) nodes_[node.next_alike].previous_alike = node.previous_alike;
  if (node.previous_alike >= 0) {
    nodes_[node.previous_alike].next_alike = node.next_alike;
    return;
  }
  const auto head = by_opening_.find(hash_of(node.parent, node.tokens.data(), kMinCopiedTokens));
  if (node.next_alike >= 0) {
    head->second = node.next_alike;
  } else {
    by_opening_.erase(head);
  }
}

PrefixTree::Path PrefixTree::insert(const std::vector<int32_t>& prompt,
                                    const std::string& salt,
                                    bool share) {
  share = share && share_;
  Path path;
  int32_t parent = root_of(salt, share);
  const int32_t length = static_cast<int32_t>(prompt.size());
  BANYAN_ASSERT(length >= 1, "prefix tree: inserted an empty prompt");
  path.reserve(pages_for(length));
  for (int32_t first = 0; first < length; first += kPageTokens) {
    const int32_t count = std::min(kPageTokens, length - first);
    const int32_t* tokens = prompt.data() + first;
    int32_t index = share ? find_child(parent, tokens, count) : -1;
    if (index < 0) index = make_node(parent, tokens, count, share ? generation_ : kUnlisted);
    path.push_back(index);
    parent = index;
  }
  // From the end, so that a page stays older than the page before it (see touch).
  for (auto it = path.rbegin(); it != path.rend(); ++it) {
    const bool cached = nodes_[*it].list != kNoList;
    if (cached) unlink(*it);
    ++nodes_[*it].num_users;
    if (cached) link_newest(*it);
  }
  return path;
}

void PrefixTree::leave(const Path& path) {
  for (auto it = path.rbegin(); it != path.rend(); ++it) {
    Node& node = nodes_[*it];
    BANYAN_ASSERT(node.num_users > 0, "prefix tree: a path left twice");
    const bool moves = node.num_users == 1 && node.list != kNoList;
    if (moves) unlink(*it);
    --node.num_users;
    if (moves) link_newest(*it);
  }
  remove_if_unused(path.back());
}

// --- holding ---

void PrefixTree::take_hold(int32_t index) {
  Node& node = nodes_[index];
  if (node.list != kNoList) unlink(index);
  pool_.share(node.page);
}

bool PrefixTree::hold(const Path& path, int32_t from, std::vector<PageCopy>& copies) {
  const int32_t length = static_cast<int32_t>(path.size());
  int32_t resident = from;  // nodes with a page come first on a path
  while (resident < length && nodes_[path[resident]].page >= 0) take_hold(path[resident++]);
  // The source of a copy may be evicted below: entries of a pass are carried out in order.
  int32_t num_equal = 0;
  int32_t source = -1;
  if (resident < length) {
    const Node& node = nodes_[path[resident]];
    const Node& parent = nodes_[node.parent];
    if (node.generation == generation_ &&
        parent.computed == static_cast<int32_t>(parent.tokens.size())) {
      const int32_t similar = find_similar(node.parent, node.tokens, &num_equal);
      if (similar >= 0) source = nodes_[similar].page;
    }
  }
  while (pool_.num_free() < length - resident) {
    if (!evict_one()) {
      drop(path, from, resident);
      return false;
    }
  }
  for (int32_t i = resident; i < length; ++i) {
    Node& node = nodes_[path[i]];
    node.page = pool_.take();  // the tree's own hold
    pool_.share(node.page);
    list_opening(path[i]);
    if (i > resident || source < 0) continue;
    // The source itself may have been evicted and be the page just taken: its rows are in place.
    if (source != node.page) copies.push_back({.from = source, .to = node.page});
    node.computed = num_equal;
  }
  return true;
}

void PrefixTree::drop(const Path& path, int32_t from, int32_t to) {
  for (int32_t i = to - 1; i >= from; --i) release(path[i]);
}

void PrefixTree::forget_tail(const Path& path) {
  Node& node = nodes_[path.back()];
  BANYAN_ASSERT(node.num_users == 1, "prefix tree: forgot a tail that others use");
  pool_.release(node.page);  // the caller's hold
  pool_.release(node.page);  // the tree's: another holder, the new owner, is left
  unlist_opening(path.back());
  node.page = -1;
  node.computed = 0;
}

PrefixTree::Path PrefixTree::hold_match(int32_t parent, const int32_t* tokens, int32_t count) {
  Path path;
  for (int32_t first = 0; first + kPageTokens <= count; first += kPageTokens) {
    const int32_t index = find_child(parent, tokens + first, kPageTokens);
    if (index < 0 || nodes_[index].page < 0 || nodes_[index].computed < kPageTokens) break;
    take_hold(index);
    path.push_back(index);
    parent = index;
  }
  return path;
}

int32_t PrefixTree::publish(int32_t parent, const int32_t* tokens, int32_t count, int32_t page) {
  if (nodes_[parent].generation != generation_) return -1;
  int32_t index = find_child(parent, tokens, count);
  if (index >= 0 && nodes_[index].page >= 0) {
    if (nodes_[index].computed < count) return -1;
    take_hold(index);
    pool_.release(page);
    return index;
  }
  if (index < 0) index = make_node(parent, tokens, count, generation_);
  nodes_[index].page = page;
  nodes_[index].computed = count;
  list_opening(index);
  pool_.share(page);
  return index;
}

int32_t PrefixTree::cost_of_hold(const Path& path, int32_t from) const {
  int32_t pages = 0;
  for (size_t i = from; i < path.size(); ++i) {
    const Node& node = nodes_[path[i]];
    pages += node.page < 0 || node.list != kNoList;
  }
  return pages;
}

// --- what is computed ---

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

void PrefixTree::rewind(int32_t index, int32_t computed) {
  nodes_[index].computed = std::min(nodes_[index].computed, computed);
}

}  // namespace banyan::rollout
