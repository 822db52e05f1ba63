// Prompts, and responses that were computed, as a tree of pages: sequences that begin with the same
// tokens share the pages of that beginning. A node is one page: kPageTokens tokens, or fewer at the
// end of a sequence (a *tail*). Nodes match on token ids under the same parent; hashes only find
// candidates.
//
// Below a root all was computed from one set of weights under one salt. new_generation() makes
// every root unreachable, so that nothing computed before can be matched: what nobody holds is
// freed at once, what is held when it is dropped.
//
// A node without a page is only a plan; `computed` tokens of a node with a page have keys and
// values. A node's first token is computed after its parent is whole, and a node has a page only if
// its parent has one, so the computed part of a path is a prefix of it.
//
// Pages that nobody holds are a cache. It is given up least recently used first, pages that no
// waiting path wants before those that one does. Paths are let go from their end, so a page leaves
// before the page before it: trunks outlive suffixes. All of this is O(1) per page. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "banyan/rollout/memory/page_pool.h"

namespace banyan::rollout {

class PrefixTree {
 public:
  static constexpr int8_t kNoList = -1;
  struct Node {
    int32_t parent = -1;          // -1: a root
    int32_t first_position = 0;   // of its tokens on the path
    int32_t page = -1;            // -1: none
    int32_t computed = 0;         // leading tokens with keys and values in the page
    int32_t num_users = 0;        // paths of insert() through it that have not left
    int32_t num_children = 0;     // nodes below it
    int64_t generation = 0;       // matched only if it is the tree's
    std::vector<int32_t> tokens;  // 1..kPageTokens; none for a root
    int32_t end() const { return first_position + static_cast<int32_t>(tokens.size()); }

    // The tree's own: its place in the cache and among pages that open alike, the salt of a root.
    int32_t older = -1;
    int32_t newer = -1;
    int8_t list = kNoList;
    bool is_listed = false;
    int32_t next_alike = -1;
    int32_t previous_alike = -1;
    const std::string* salt = nullptr;
  };
  using Path = std::vector<int32_t>;  // nodes, root's child first

  // `pool` is borrowed. share = false: nothing is matched, every path has nodes of its own.
  PrefixTree(PagePool& pool, bool share);

  // Adds a prompt of at least one token under the root of `salt`: a user of every node of its path.
  // Takes no page. share = false: with nodes of its own.
  Path insert(const std::vector<int32_t>& prompt, const std::string& salt, bool share = true);
  // The path has no more work.
  void leave(const Path& path);

  // Holds nodes [from, end) of a path: their pages stay until they are dropped. Missing pages are
  // taken from the pool, after giving up cached ones; false, with nothing changed but the cache, if
  // there are not enough. If a computed page under the same parent begins with the same tokens, at
  // least kMinCopiedTokens of them, they are copied instead of computed.
  bool hold(const Path& path, int32_t from, std::vector<PageCopy>& copies);
  // Drops the hold on nodes [from, to) of a path.
  void drop(const Path& path, int32_t from, int32_t to);
  // Gives up a tail held by the caller alone and used by no other path.
  void forget_tail(const Path& path);

  // The computed whole pages below `parent` that hold the beginning of `count` tokens. Held for the
  // caller, who drops them.
  Path hold_match(int32_t parent, const int32_t* tokens, int32_t count);
  // Makes a page of the caller's, which holds `count` computed tokens that follow `parent`, a node.
  // The caller's hold of the page becomes one of the node; where another page with these tokens is
  // there already, the caller's is given back for a hold of that one. -1, with nothing changed: the
  // tokens are being computed by somebody else, or the parent is of an earlier generation.
  int32_t publish(int32_t parent, const int32_t* tokens, int32_t count, int32_t page);

  // Frees the page of the cache that is given up first; false if there is none.
  bool evict_one();
  int32_t num_cached() const { return num_cached_; }
  int64_t num_evicted() const { return num_evicted_; }
  // Pages that hold(path, from) takes out of `free + cached`.
  int32_t cost_of_hold(const Path& path, int32_t from) const;

  // Computed positions of a path, a prefix.
  int32_t computed(const Path& path) const;
  // Marks positions up to `end` of a path as computed.
  void advance(const Path& path, int32_t end);
  // Takes that back, down to `computed` tokens of a node.
  void rewind(int32_t node, int32_t computed);

  // Nothing that is in the tree now is matched again.
  void new_generation();
  int64_t generation() const { return generation_; }

  const Node& node(int32_t index) const { return nodes_[index]; }
  int32_t num_nodes() const;  // with tokens, of any generation
  // Indices that node() takes; those not in use have no page.
  int32_t num_indices() const { return static_cast<int32_t>(nodes_.size()); }

  static constexpr int32_t kMinCopiedTokens = 16;

 private:
  enum : int8_t { kUnwanted = 0, kWanted = 1 };  // cached pages without and with users
  struct List {
    int32_t oldest = -1;
    int32_t newest = -1;
  };

  int32_t root_of(const std::string& salt, bool share);
  int32_t make_node(int32_t parent, const int32_t* tokens, int32_t count, int64_t generation);
  int32_t find_child(int32_t parent, const int32_t* tokens, int32_t count) const;
  int32_t find_similar(int32_t parent, const std::vector<int32_t>& tokens, int32_t* count) const;
  void remove_if_unused(int32_t index);
  void unlink(int32_t index);
  void link_newest(int32_t index);
  void free_page(int32_t index);
  void list_opening(int32_t index);
  void unlist_opening(int32_t index);
  void take_hold(int32_t index);
  void release(int32_t index);

  PagePool& pool_;
  bool share_;
  int64_t generation_ = 0;
  std::vector<Node> nodes_;
  std::vector<int32_t> free_nodes_;
  int32_t num_roots_ = 0;
  std::unordered_map<std::string, int32_t> roots_;        // of this generation, by salt
  std::unordered_multimap<uint64_t, int32_t> by_tokens_;  // of (parent, tokens)
  // Of (parent, first kMinCopiedTokens tokens): the node last given a page, of those with one.
  std::unordered_map<uint64_t, int32_t> by_opening_;
  List lists_[2];
  int32_t num_cached_ = 0;
  int64_t num_evicted_ = 0;
};

}  // namespace banyan::rollout
