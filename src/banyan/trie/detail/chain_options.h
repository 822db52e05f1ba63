// The ways to open a chain of tokens below a state of the cutter (see cutter.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "banyan/trie/detail/cut_states.h"

namespace banyan::trie::detail {

// One way to open the chain to `node` from a state: recomputed tokens, then retained ones, then
// either one closed block or a state at (node, depth).
// Between the state's place and `node` there may be other forks. What hangs off them behind `node`
// either takes their tokens from the chain too (`keeps`), which stays alive for it, or copies them.
struct ChainOption {
  int32_t node = 0;   // its samples from `first` on are dealt with
  int32_t tip = 0;    // the chain ends in this node: `node`, or one on the path of `first` below it
  int32_t first = 0;  // first sample behind it that the state has not dealt with
  int32_t depth = 0;  // the chain ends in front of this depth
  int32_t until =
      0;  // > 0: a closed block behind it takes all that is left in front of this sample
  int64_t recomputed = 0;
  int64_t retained = 0;
  bool keeps = false;
  int32_t forced = 0;  // broken wishes
  double cost = 0.0;   // of the chain's blocks and copies, and of that closed block
};

// A chain that is longer than the room is cut evenly; piece m starts behind so many of its tokens.
inline int64_t num_pieces(int64_t tokens, int64_t room) { return (tokens + room - 1) / room; }
inline int64_t piece_begin(int64_t tokens, int64_t pieces, int64_t m) {
  return m * tokens / pieces;
}

// Samples whose suffix sums are not needed: the inside of big subtrees far below the state.
struct Hole {
  int32_t first = 0;
  int32_t last = 0;
};

// Lists the options below `state`, and the holes. Order is deterministic.
class ChainLister {
 public:
  ChainLister(const ForkTree& tree, const PlanOptions& options, const Prices& prices);

  bool fits(int64_t tokens, int64_t samples, int64_t retained) const {
    return tokens <= limits_.tokens - retained && samples <= limits_.samples;
  }
  // How full a block is, 0 to 1.
  double fill(int64_t tokens, int64_t samples, int64_t retained) const {
    const auto part = [](int64_t used, int64_t room) {
      return static_cast<double>(used) / static_cast<double>(room);
    };
    return std::max(part(tokens, limits_.tokens - retained), part(samples, limits_.samples));
  }
  bool may_copy() const { return carry_ == Carry::kAuto || carry_ == Carry::kReplay; }
  int64_t capacity(int64_t retained) const { return limits_.tokens - retained; }

  void list(const CutState& state, std::vector<ChainOption>& options, std::vector<Hole>& holes);

  // Calls visit(state) for what the option leaves to price, in packed order, and returns the first
  // sample of `state` behind it all.
  template <typename Visit>
  int32_t for_each_below(const CutState& state, const ChainOption& option, Visit visit) const {
    const auto& nodes = tree_.nodes();
    const int64_t retained = state.retained + option.retained;
    int32_t from = option.until;
    if (from == 0) {
      from = nodes[option.node].last;
      visit(CutState{option.node, option.depth, retained, rest_of(option)});
    }
    if (!option.keeps) return from;
    for (int32_t u = nodes[option.node].parent; is_between(state, u); u = nodes[u].parent) {
      if (from < nodes[u].last) visit(CutState{u, nodes[u].end, retained, from});
      from = std::max(from, nodes[u].last);
    }
    return from;
  }

  // First sample behind the chain that has tokens left.
  int32_t rest_of(const ChainOption& option) const {
    return std::max(option.first, tree_.first_longer(option.tip, option.depth));
  }

 private:
  bool is_big(const CutState& state, int32_t v) const;
  void list_cut_inside(const CutState& state,
                       const ChainOption& option,
                       int32_t until,
                       std::vector<ChainOption>& out) const;
  void list_cuts_past(const CutState& state,
                      const ChainOption& option,
                      std::vector<ChainOption>& out) const;
  int32_t uppermost(const CutState& state, int32_t v) const;
  void list_closing(const CutState& state,
                    ChainOption option,
                    int32_t last,
                    int64_t retained,
                    std::vector<ChainOption>& out) const;
  void list_leaf(const CutState& state, ChainOption option, std::vector<ChainOption>& out) const;
  void list_fork(const CutState& state, ChainOption option, std::vector<ChainOption>& out) const;
  void list_node(const CutState& state, int32_t v, std::vector<ChainOption>& out) const;
  // What options.carry allows below node v, or what must be allowed because a path is longer than
  // the room.
  bool wants_retain() const { return carry_ == Carry::kAuto || carry_ == Carry::kRetain; }
  bool wants_recompute(const CutState& state, int32_t v) const {
    const bool too_long = tree_.nodes()[v].max_length - state.depth > capacity(state.retained);
    return carry_ == Carry::kAuto || carry_ == Carry::kRecompute || too_long;
  }
  // Node u's fork is below the state's depth (u below the state's node, or the node itself).
  bool is_between(const CutState& state, int32_t u) const {
    return u >= 0 && tree_.nodes()[u].end > state.depth;
  }
  void add(const CutState& state, ChainOption option, std::vector<ChainOption>& out) const;
  void add_chain(const CutState& state,
                 ChainOption option,
                 int64_t depth,
                 int64_t retained,
                 std::vector<ChainOption>& out) const;

  const ForkTree& tree_;
  const Prices& prices_;
  Limits limits_;
  Carry carry_;
  size_t max_levels_ = 1;
  std::vector<int64_t> largest_below_;  // [nodes] tokens of the largest subtree at its end
  std::vector<std::pair<int32_t, size_t>> queue_;  // node, level
};

}  // namespace banyan::trie::detail
