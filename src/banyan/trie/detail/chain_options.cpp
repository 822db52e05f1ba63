// Options are listed for *big* nodes, those whose samples do not fit into one block below the
// state. For node v with its fork at the end of its chain:
//   * the chain to the fork, retained, recomputed or in two parts;
//   * the chain up to where all the rest of v is exactly one block;
//   * where the chain leaves other forks behind, or goes on to forks below v that would fit by
//     themselves: with one closed block that also takes some of what hangs off higher up.
#include "banyan/trie/detail/chain_options.h"

#include <iterator>

namespace banyan::trie::detail {
namespace {

// Big subtrees that a state may look through (replaying what lies between), and how many of them.
// Deeper ones are reached from the states in between.
constexpr size_t kMaxLevels = 8;
constexpr size_t kMaxNodes = 64;

// Forks that a chain may go past its last big subtree, and branches it may help to close.
constexpr int32_t kMaxPast = 3;

}  // namespace

ChainLister::ChainLister(const ForkTree& tree, const PlanOptions& options, const Prices& prices)
    : tree_(tree), prices_(prices), limits_(options), carry_(options.carry) {
  if (carry_ == Carry::kAuto) max_levels_ = kMaxLevels;
  if (carry_ == Carry::kReplay) max_levels_ = tree.num_samples() + 1;
  const auto& nodes = tree_.nodes();
  largest_below_.assign(nodes.size(), 0);
  for (auto v = static_cast<int32_t>(nodes.size()) - 1; v >= 0; --v) {
    for (int32_t w = v + 1; w < nodes[v].next; w = nodes[w].next) {
      const int64_t below = tree_.tokens(nodes[w].first, nodes[w].last) - nodes[w].start;
      largest_below_[v] = std::max(largest_below_[v], below);
    }
  }
}

// Samples of v that the state has still to do do not fit into one block.
bool ChainLister::is_big(const CutState& state, int32_t v) const {
  const ForkNode& node = tree_.nodes()[v];
  const int32_t first = std::max(state.first, node.first);
  if (first >= node.last) return false;
  const int64_t whole = tree_.tokens(first, node.last) - state.depth;
  return !fits(whole, node.last - first, state.retained);
}

// The uppermost fork that a chain from the state to node v passes, or -1.
int32_t ChainLister::uppermost(const CutState& state, int32_t v) const {
  const auto& nodes = tree_.nodes();
  int32_t top = -1;
  for (int32_t u = nodes[v].parent; is_between(state, u); u = nodes[u].parent) top = u;
  return top;
}

// Prices the chain and appends the option if what follows has room.
void ChainLister::add(const CutState& state,
                      ChainOption option,
                      std::vector<ChainOption>& out) const {
  const int64_t room = capacity(state.retained);
  if (option.retained > room || (option.until == 0 && option.retained >= room)) return;
  const bool may_recompute = carry_ == Carry::kAuto || carry_ == Carry::kRecompute;
  if (option.retained > 0) {
    option.forced += wants_retain() ? 0 : 1;
    option.cost += prices_.block(option.depth - option.retained);
  }
  if (option.recomputed > 0) {
    option.forced += may_recompute ? 0 : 1;
    const int64_t pieces = num_pieces(option.recomputed, room);
    for (int64_t m = 0; m < pieces; ++m) {
      option.cost += prices_.block(state.depth + piece_begin(option.recomputed, pieces, m));
    }
    option.cost += prices_.recompute(option.recomputed);
  }
  option.cost += prices_.penalty() * option.forced;
  const int32_t top = uppermost(state, option.node);
  if (top >= 0 &&
      tree_.nodes()[top].last > std::max(option.until, tree_.nodes()[option.node].last)) {
    const bool only = option.keeps || !may_copy();
    option.keeps = true;
    out.push_back(option);
    option.keeps = false;
    if (only) return;
  }
  out.push_back(option);
}

void ChainLister::add_chain(const CutState& state,
                            ChainOption option,
                            int64_t depth,
                            int64_t retained,
                            std::vector<ChainOption>& out) const {
  option.depth = static_cast<int32_t>(depth);
  option.retained = retained;
  option.recomputed = depth - state.depth - retained;
  add(state, option, out);
}

// Recomputes as much of the first sample's path as makes the rest in front of sample `until`
// exactly one full block.
void ChainLister::list_cut_inside(const CutState& state,
                                  const ChainOption& option,
                                  int32_t until,
                                  std::vector<ChainOption>& out) const {
  const auto& nodes = tree_.nodes();
  const ForkNode& node = nodes[option.node];
  const int64_t depth = tree_.tokens(option.first, until) - capacity(state.retained);
  if (depth <= std::max(node.start, state.depth)) return;
  ChainOption cut = option;
  while (!tree_.is_leaf(cut.tip) && depth > nodes[cut.tip].end) ++cut.tip;
  if (tree_.is_leaf(cut.tip) && depth >= nodes[cut.tip].end) return;
  const int32_t rest =
      std::max(option.first, tree_.first_longer(cut.tip, static_cast<int32_t>(depth)));
  const bool closes = until - rest <= limits_.samples;
  if (until < node.last) {
    if (!closes || cut.tip == cut.node) return;
    cut.node = cut.tip;
    cut.keeps = true;
  } else if (!closes && cut.tip != cut.node) {
    return;
  }
  if (closes) {
    cut.until = until;
    cut.cost += prices_.block(depth);
  }
  if (rest - option.first > limits_.samples) ++cut.forced;
  add_chain(state, cut, depth, 0, out);
}

// Cuts inside for the first branches of v that would not fit into one block without.
void ChainLister::list_cuts_past(const CutState& state,
                                 const ChainOption& option,
                                 std::vector<ChainOption>& out) const {
  const auto& nodes = tree_.nodes();
  const ForkNode& node = nodes[option.node];
  const int64_t room = capacity(state.retained);
  int32_t tried = 0;
  for (int32_t w = option.node + 1; w < node.next && tried < kMaxPast; w = nodes[w].next) {
    const int32_t until = nodes[w].last;
    if (until >= node.last || until <= option.first) continue;
    if (tree_.tokens(option.first, until) - node.end <= room) continue;
    list_cut_inside(state, option, until, out);
    ++tried;
  }
}

// The chain ends at option.tip's fork and one closed block takes all below it and as much of what
// hangs off the chain higher up as fits.
void ChainLister::list_closing(const CutState& state,
                               ChainOption option,
                               int32_t last,
                               int64_t retained,
                               std::vector<ChainOption>& out) const {
  const ForkNode& node = tree_.nodes()[option.tip];
  option.node = option.tip;
  option.depth = node.end;
  option.keeps = true;
  const int32_t rest = rest_of(option);
  const int64_t room = capacity(state.retained + retained);
  const auto fits = [&](int32_t end) {
    return tree_.tokens(rest, end) - node.end <= room && end - rest <= limits_.samples;
  };
  if (rest >= node.last || !fits(node.last)) return;
  int32_t low = node.last, high = last;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (fits(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (rest - option.first > limits_.samples) ++option.forced;
  option.until = low;
  option.cost += prices_.block(node.end);
  add_chain(state, option, node.end, retained, out);
}

// A path without forks behind it: more samples end on it than one block takes. All but the last
// token is shared.
void ChainLister::list_leaf(const CutState& state,
                            ChainOption option,
                            std::vector<ChainOption>& out) const {
  const ForkNode& node = tree_.nodes()[option.node];
  const int32_t depth = node.end - 1;
  if (node.last - option.first <= limits_.samples || depth <= std::max(node.start, state.depth)) {
    return;
  }
  if (tree_.first_longer(option.node, depth) - option.first > limits_.samples) ++option.forced;
  if (wants_retain()) add_chain(state, option, depth, depth - state.depth, out);
  if (wants_recompute(state, option.node)) add_chain(state, option, depth, 0, out);
}

// A chain to the fork at the end of option.node.
void ChainLister::list_fork(const CutState& state,
                            ChainOption option,
                            std::vector<ChainOption>& out) const {
  const ForkNode& node = tree_.nodes()[option.node];
  const int32_t rest = std::max(option.first, tree_.first_longer(option.node, node.end));
  if (rest - option.first > limits_.samples) ++option.forced;
  const int64_t room = capacity(state.retained);
  const int64_t length = node.end - state.depth;
  const bool recompute = wants_recompute(state, option.node);
  if (wants_retain() && length <= room) add_chain(state, option, node.end, length, out);
  if (recompute) add_chain(state, option, node.end, 0, out);
  if (!wants_retain() || !recompute) return;
  // Retain as much as leaves room below for everything, for the largest branch, for the longest
  // path, or for half.
  const int64_t parts[] = {room - (tree_.tokens(rest, node.last) - node.end),
                           room - largest_below_[option.node],
                           room - (node.max_length - node.end),
                           room / 2};
  for (const auto* part = std::begin(parts); part != std::end(parts); ++part) {
    const bool seen = std::find(std::begin(parts), part, *part) != part;
    if (seen || *part <= 0 || *part >= length) continue;
    add_chain(state, option, node.end, *part, out);
  }
}

void ChainLister::list_node(const CutState& state, int32_t v, std::vector<ChainOption>& out) const {
  const ForkNode& node = tree_.nodes()[v];
  ChainOption option;
  option.node = option.tip = v;
  option.first = std::max(state.first, node.first);
  if (tree_.shared(option.first) > state.depth) {
    option.cost = prices_.copy(option.first, state.depth, tree_.shared(option.first));
    option.forced = may_copy() ? 0 : 1;
  }
  const bool retain = wants_retain();
  const bool recompute = wants_recompute(state, v);
  if (recompute) list_cut_inside(state, option, node.last, out);
  if (tree_.is_leaf(v)) return list_leaf(state, option, out);
  if (!retain && !recompute) return;
  const int32_t top = uppermost(state, v);
  const int32_t last = top < 0 ? node.last : tree_.nodes()[top].last;
  ChainOption past = option;
  for (int32_t k = 0; k <= kMaxPast && !tree_.is_leaf(past.tip); ++k, ++past.tip) {
    if (k > 0 && is_big(state, past.tip)) break;
    if (k == 0 && last == node.last) continue;
    const int64_t length = tree_.nodes()[past.tip].end - state.depth;
    if (retain) list_closing(state, past, last, length, out);
    if (recompute) list_closing(state, past, last, 0, out);
  }
  if (recompute) list_cuts_past(state, option, out);
  list_fork(state, option, out);
}

void ChainLister::list(const CutState& state,
                       std::vector<ChainOption>& options,
                       std::vector<Hole>& holes) {
  options.clear();
  holes.clear();
  const auto& nodes = tree_.nodes();
  queue_.clear();
  const auto add_children = [&](int32_t v, size_t level) {
    for (int32_t w = v + 1; w < nodes[v].next; w = nodes[w].next) {
      if (is_big(state, w)) queue_.emplace_back(w, level);
    }
  };
  if (state.depth >= nodes[state.node].end) {
    add_children(state.node, 1);
  } else if (is_big(state, state.node)) {
    queue_.emplace_back(state.node, 1);
  }
  size_t near = 0;  // nodes of the first two levels
  for (size_t i = 0; i < queue_.size(); ++i) {
    const auto [v, level] = queue_[i];
    near += level <= 2 ? 1 : 0;
    list_node(state, v, options);
    if (tree_.is_leaf(v)) continue;
    const bool few = queue_.size() < kMaxNodes + 4 * near || carry_ == Carry::kReplay;
    if (level < max_levels_ && few) {
      add_children(v, level + 1);
    } else {
      holes.push_back({std::max(state.first, nodes[v].first), nodes[v].last});
    }
  }
}

}  // namespace banyan::trie::detail
