// Three passes over the nodes. Down: every state lists its options and so asks for states of nodes
// below it. Up: states are priced, children before parents. Down again along the cheapest choices,
// which gives the blocks in packed order.
#include "banyan/trie/detail/cutter.h"

#include <algorithm>
#include <deque>
#include <limits>

#include "banyan/core/error.h"
#include "banyan/trie/detail/chain_options.h"
#include "banyan/trie/detail/state_table.h"

namespace banyan::trie::detail {
namespace {

// The cheapest way from sample `at` to the end of a state's interval.
struct Step {
  int32_t at = 0;
  int32_t next = 0;     // first sample of the following step
  int32_t option = -1;  // into the options, or -1: closed block [at, next)
  int32_t joined = -1;  // the option's last block also takes samples up to here (= next)
  int32_t way = 0;      // which way the last state below the option goes (Asked::best)
  Stretch stretch;      // this step and all that follow
};

class Cutter {
 public:
  Cutter(const ForkTree& tree, const PlanOptions& options)
      : tree_(tree),
        prices_(options.cost, tree),
        lister_(tree, options, prices_),
        table_(tree.nodes().size()),
        step_of_(tree.num_samples() + 1, 0) {}

  CutList run() {
    request_states();
    for (auto v = static_cast<int32_t>(tree_.nodes().size()) - 1; v >= 0; --v) {
      // Deeper cuts inside the chain first: they are what shallower ones ask for.
      auto& states = table_.of(v);
      std::for_each(states.rbegin(), states.rend(), [&](Priced& priced) { price(priced); });
    }
    result_.cost = table_.of(0)[0].asked[0].best[0].cost;
    BANYAN_ASSERT(result_.cost < kNever, "cut: no way");
    collect();
    return std::move(result_);
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  int32_t last_of(const CutState& state) const { return tree_.nodes()[state.node].last; }

  bool whole_fits(const CutState& state, int32_t first, int32_t last) const {
    return lister_.fits(tree_.tokens(first, last) - state.depth, last - first, state.retained);
  }

  void request_states() {
    table_.request({});
    for (int32_t v = 0; v < static_cast<int32_t>(tree_.nodes().size()); ++v) {
      table_.settle(v, -1);
      // A state may ask for deeper ones of the same node.
      for (size_t i = 0; i < table_.of(v).size(); ++i) {
        const CutState state = table_.of(v)[i].state;
        const int32_t last = last_of(state);
        if (state.first == last || whole_fits(state, state.first, last)) continue;
        lister_.list(state, options_, holes_);
        const size_t before = table_.num_requests(v);
        for (const ChainOption& option : options_) {
          lister_.for_each_below(state, option, [&](const CutState& s) { table_.request(s); });
        }
        if (table_.num_requests(v) > before) table_.settle(v, state.depth);
      }
      table_.forget_requests(v);
    }
  }

  // What a block that starts at sample `at` costs beside its own tokens.
  double start_cost(const CutState& state, int32_t at) const {
    const double block = prices_.block(state.depth);
    if (tree_.shared(at) <= state.depth) return block;
    const double copy = prices_.copy(at, state.depth, tree_.shared(at));
    return block + copy + (lister_.may_copy() ? 0.0 : prices_.penalty());
  }

  // What way 1 does not count of the closed block at the end.
  double discount(const Stretch& stretch, int32_t last) const {
    if (stretch.tail < 0) return 0.0;
    const int64_t tokens = tree_.tokens(stretch.tail, last) - stretch.tail_depth;
    const double fill = lister_.fill(tokens, last - stretch.tail, stretch.tail_retained);
    return prices_.block(stretch.tail_depth) * (1.0 - fill);
  }

  void price(Priced& priced) {
    const CutState& state = priced.state;
    const int32_t last = last_of(state);
    const bool fits = state.first == last || whole_fits(state, state.first, last);
    if (!fits) list(state);
    for (int32_t way = 0; way < 2; ++way) {
      if (!fits) walk(state, way);
      for (Asked& asked : priced.asked) {
        Stretch& best = asked.best[way];
        if (asked.first == last) continue;
        if (fits) {
          best = closed(state, asked.first);
          continue;
        }
        const int32_t step = step_at(asked.first);
        if (step < 0) {
          best.cost = kNever;  // inside a hole
          continue;
        }
        best = steps_[step].stretch;
        if (way == 1) best.cost += discount(best, last);
      }
    }
  }

  // One closed block from `first` to the end.
  Stretch closed(const CutState& state, int32_t first) const {
    Stretch one;
    one.cost = start_cost(state, first);
    one.tail = first;
    one.tail_depth = state.depth;
    one.tail_retained = state.retained;
    return one;
  }

  // Options and holes of the state, from the back to the front.
  void list(const CutState& state) {
    lister_.list(state, options_, holes_);
    const auto later = [](const auto& a, const auto& b) { return a.first > b.first; };
    std::stable_sort(options_.begin(), options_.end(), later);
    std::sort(holes_.begin(), holes_.end(), later);
  }

  // The step of this walk that begins at `sample`, or -1.
  int32_t step_at(int32_t sample) const {
    const int32_t step = step_of_[sample];
    const bool valid = step < static_cast<int32_t>(steps_.size()) && steps_[step].at == sample;
    return valid ? step : -1;
  }

  // Fills steps_ from the end of the interval to its first sample. Needs list(state).
  void walk(const CutState& state, int32_t way) {
    const int32_t last = last_of(state);
    steps_.assign(1, Step());
    steps_[0].at = steps_[0].next = last;
    step_of_[last] = 0;
    queue_.clear();
    size_t option = 0;
    size_t hole = 0;
    for (int32_t at = last - 1; at >= state.first; --at) {
      if (hole < holes_.size() && at < holes_[hole].last) at = holes_[hole++].first;
      Step step;
      step.at = at;
      step.stretch.cost = kNever;
      try_closed(state, last, way, step);
      for (; option < options_.size() && options_[option].first == at; ++option) {
        try_option(state, static_cast<int32_t>(option), last, way, step);
      }
      const auto index = static_cast<int32_t>(steps_.size());
      step_of_[at] = index;
      steps_.push_back(step);
      while (!queue_.empty() && steps_[queue_.back()].stretch.cost > step.stretch.cost) {
        queue_.pop_back();
      }
      queue_.push_back(index);
    }
  }

  // Closed blocks [step.at, i): to the end, or to the cheapest step within reach. queue_ holds the
  // steps that may still become that one, ascending in cost, descending in position.
  void try_closed(const CutState& state, int32_t last, int32_t way, Step& step) {
    const double start = start_cost(state, step.at);
    while (!queue_.empty() && !whole_fits(state, step.at, steps_[queue_.front()].at)) {
      queue_.pop_front();
    }
    if (!queue_.empty()) {
      step.next = steps_[queue_.front()].at;
      step.stretch = steps_[queue_.front()].stretch;
      step.stretch.cost += start;
    }
    if (!whole_fits(state, step.at, last)) return;
    Stretch all = closed(state, step.at);
    if (way == 1) all.cost -= discount(all, last);
    if (all.cost > step.stretch.cost) return;
    step.next = last;
    step.stretch = all;
  }

  // Replaces `step` if the option is cheaper.
  void try_option(const CutState& state, int32_t index, int32_t last, int32_t way, Step& step) {
    const ChainOption& option = options_[index];
    Stretch through[2];
    through[0].cost = option.cost;
    if (option.until > 0) {
      through[0].tail = lister_.rest_of(option);
      through[0].tail_depth = option.depth;
      through[0].tail_retained = state.retained + option.retained;
    }
    through[1] = through[0];
    const int32_t natural = lister_.for_each_below(state, option, [&](const CutState& s) {
      if (s.first == last_of(s)) return;
      const Asked& below = table_.answer(s);
      const double so_far = through[0].cost;
      for (int32_t w = 0; w < 2; ++w) {
        through[w] = below.best[w];
        through[w].cost += so_far;
      }
    });
    for (int32_t w = 0; w < 2; ++w) {
      const int32_t after = step_at(natural);
      const int32_t joined = join(through[w], after);
      for (const int32_t end : {after, joined}) {
        double cost = through[w].cost + steps_[end].stretch.cost;
        if (end == 0 && way == 1) cost -= discount(through[w], last);
        if (cost >= step.stretch.cost) continue;
        step.next = steps_[end].at;
        step.option = index;
        step.joined = end == after ? -1 : step.next;
        step.way = w;
        step.stretch = end == 0 ? through[w] : steps_[end].stretch;
        step.stretch.cost = cost;
      }
    }
  }

  // The furthest step that the tail of `stretch` can be extended to; steps stand from the back to
  // the front.
  int32_t join(const Stretch& stretch, int32_t from) const {
    if (stretch.tail < 0) return from;
    int32_t low = 0, high = from;  // the answer is in [low, high]
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      const int32_t last = steps_[middle].at;
      const int64_t tokens = tree_.tokens(stretch.tail, last) - stretch.tail_depth;
      if (lister_.fits(tokens, last - stretch.tail, stretch.tail_retained)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  void emit_chain(const CutState& state, const ChainOption& option) {
    const auto add = [&](int32_t carried, int64_t tokens, CarryPolicy policy) {
      CutBlock block;
      block.sample = option.first;
      block.carried = carried;
      block.tokens = tokens;
      block.retained = state.retained;
      block.open = true;
      block.policy = policy;
      result_.blocks.push_back(block);
    };
    const int64_t room = lister_.capacity(state.retained);
    const int64_t pieces = num_pieces(option.recomputed, room);
    for (int64_t m = 0; m < pieces; ++m) {
      const int64_t begin = piece_begin(option.recomputed, pieces, m);
      const int64_t end = piece_begin(option.recomputed, pieces, m + 1);
      add(static_cast<int32_t>(state.depth + begin), end - begin, CarryPolicy::kRecompute);
    }
    if (option.retained > 0) {
      add(static_cast<int32_t>(option.depth - option.retained),
          option.retained,
          CarryPolicy::kRetain);
    }
    result_.forced += option.forced;
  }

  void emit_closed(const CutState& state, int32_t first, int32_t last) {
    CutBlock block;
    block.sample = first;
    block.carried = state.depth;
    block.tokens = tree_.tokens(first, last) - state.depth;
    block.retained = state.retained;
    if (!lister_.may_copy() && tree_.shared(first) > state.depth) ++result_.forced;
    result_.blocks.push_back(block);
  }

  void join_last(int32_t last) {
    CutBlock& block = result_.blocks.back();
    BANYAN_ASSERT(!block.open, "cut: nothing to join");
    block.tokens = tree_.tokens(block.sample, last) - block.carried;
  }

  // Part of the plan that is still to be written out.
  struct Visit {
    enum class Kind : uint8_t { kState, kClosed, kChain, kJoin } kind = Kind::kState;
    CutState state;
    int32_t first = 0;  // of a state: where to begin, and which way
    int32_t way = 0;
    Step step;           // the others are steps of `state`
    ChainOption option;  // of a chain
  };

  // Walks the cheapest choices depth first.
  void collect() {
    visits_.assign(1, Visit());
    visits_.back().state = table_.of(0)[0].state;
    while (!visits_.empty()) {
      const Visit now = visits_.back();
      visits_.pop_back();
      switch (now.kind) {
        case Visit::Kind::kState:
          expand(now);
          break;
        case Visit::Kind::kClosed:
          emit_closed(now.state, now.step.at, now.step.next);
          break;
        case Visit::Kind::kChain:
          follow(now);
          break;
        case Visit::Kind::kJoin:
          join_last(now.step.joined);
          break;
      }
    }
  }

  void follow(const Visit& chain) {
    const ChainOption& option = chain.option;
    emit_chain(chain.state, option);
    if (option.until > 0) {
      CutState inner = chain.state;
      inner.depth = option.depth;
      inner.retained += option.retained;
      emit_closed(inner, lister_.rest_of(option), option.until);
    }
    const size_t size = visits_.size();
    lister_.for_each_below(chain.state, option, [&](const CutState& s) {
      if (s.first == last_of(s)) return;
      visits_.emplace_back();
      visits_.back().state = table_.at(s).state;
      visits_.back().first = s.first;
    });
    if (visits_.size() > size) visits_.back().way = chain.step.way;
    std::reverse(visits_.begin() + static_cast<int64_t>(size), visits_.end());
  }

  void expand(const Visit& now) {
    const CutState& state = now.state;
    const int32_t last = last_of(state);
    if (whole_fits(state, now.first, last)) {
      emit_closed(state, now.first, last);
      return;
    }
    list(state);
    walk(state, now.way);
    const size_t size = visits_.size();
    for (int32_t at = now.first; at < last;) {
      Visit visit;
      visit.state = state;
      visit.step = steps_[step_at(at)];
      visit.kind = visit.step.option < 0 ? Visit::Kind::kClosed : Visit::Kind::kChain;
      if (visit.step.option >= 0) visit.option = options_[visit.step.option];
      visits_.push_back(visit);
      if (visit.step.joined >= 0) {
        visit.kind = Visit::Kind::kJoin;
        visits_.push_back(visit);
      }
      at = visit.step.next;
    }
    std::reverse(visits_.begin() + static_cast<int64_t>(size), visits_.end());
  }

  const ForkTree& tree_;
  const Prices prices_;
  ChainLister lister_;
  StateTable table_;
  CutList result_;
  std::vector<Visit> visits_;

  // Working memory of one walk.
  std::vector<ChainOption> options_;
  std::vector<Hole> holes_;
  std::vector<Step> steps_;
  std::deque<int32_t> queue_;
  std::vector<int32_t> step_of_;  // per sample
};

}  // namespace

CutList cut(const ForkTree& tree, const PlanOptions& options) {
  return Cutter(tree, options).run();
}

}  // namespace banyan::trie::detail
