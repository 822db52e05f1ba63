// The prompts of one generate call as a tree of pages: prompts that begin with the same tokens
// share the pages of that beginning. A node is one page: kPageTokens tokens, or fewer at the end of
// a prompt (a *tail*; shared only by prompts that end there alike). Nodes match on token ids under
// the same parent.
//
// A node without a page is only a plan; `computed` tokens of a node with a page have keys and
// values. A node's first token is computed after its parent is whole, so the computed part of a
// path is a prefix of it. Pages that nobody holds stay as a cache while a later prompt of the call
// may want them, and are given up, deepest first, when the pool runs out. The tree dies with the
// call: weights may change between calls, and nothing stale can be met. Torch-free.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "banyan/rollout/page_pool.h"

namespace banyan::rollout {

class PrefixTree {
 public:
  struct Node {
    int32_t parent = -1;
    int32_t first_position = 0;   // of its tokens on the path
    int32_t page = -1;            // -1: none
    int32_t computed = 0;         // leading tokens with keys and values in the page
    int32_t num_users = 0;        // prompts through this node that still have work
    std::vector<int32_t> tokens;  // 1..kPageTokens
    int32_t end() const { return first_position + static_cast<int32_t>(tokens.size()); }
  };
  using Path = std::vector<int32_t>;  // nodes, root first

  // `pool` is borrowed. share = false: every prompt has nodes of its own.
  PrefixTree(PagePool& pool, bool share) : pool_(pool), share_(share) {}

  // Adds a prompt (a user of every node of its path). Takes no page.
  Path insert(const std::vector<int32_t>& prompt);
  // The prompt of `path` has no more work: pages without users left go back to the pool.
  void leave(const Path& path);

  // Holds nodes [from, end) of a path: their pages stay until they are dropped. Missing pages are
  // taken from the pool, after giving up cached ones; false, with nothing changed but the cache, if
  // there are not enough.
  bool hold(const Path& path, int32_t from);
  // Drops the hold on nodes [from, to) of a path.
  void drop(const Path& path, int32_t from, int32_t to);
  // Gives up a tail held by the caller alone and used by no other prompt.
  void forget_tail(const Path& path);

  // Frees one cached page; false if there is none.
  bool evict_one();
  int32_t num_cached() const;
  // Pages that hold(path, from) takes out of `free + cached`.
  int32_t cost_of_hold(const Path& path, int32_t from) const;

  // Computed positions of a path, a prefix.
  int32_t computed(const Path& path) const;
  // Marks positions up to `end` of a path as computed.
  void advance(const Path& path, int32_t end);

  const Node& node(int32_t index) const { return nodes_[index]; }
  int32_t num_nodes() const { return static_cast<int32_t>(nodes_.size()); }

 private:
  int32_t find_child(int32_t parent, const int32_t* tokens, int32_t count, uint64_t hash) const;
  bool is_cached(const Node& node) const { return node.page >= 0 && pool_.holders(node.page) == 1; }
  void free_page(Node& node);

  PagePool& pool_;
  bool share_;
  std::vector<Node> nodes_;
  std::unordered_multimap<uint64_t, int32_t>
      by_hash_;  // of (parent, tokens); equality is on the ids
};

}  // namespace banyan::rollout
