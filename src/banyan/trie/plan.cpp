// Where to cut. Samples stand in depth-first order; block [a, b) of that order computes
//   tokens(a, b) = length(a) + sum of (length(i) - shared(i)) for a < i < b
// so a cut in front of sample a costs shared(a) tokens again: the trunk above the fork, replayed.
//   1. A cut in front of i is allowed unless it would split a subtree that fits into one block: the
//   subtree at
//      the fork between i - 1 and i is the run of samples around them that share at least shared(i)
//      tokens.
//   2. Among the allowed cuts a dynamic program takes the set with the least
//      replayed tokens + kBlockCost per block. "Fits" is inherited by parts of a run, so the first
//      sample that a block ending at b may start from only moves forward with b, and a monotone
//      queue gives O(S) in all.
#include "banyan/trie/plan.h"

#include <algorithm>
#include <deque>
#include <limits>

#include "banyan/core/error.h"
#include "banyan/trie/detail/edges.h"
#include "banyan/trie/detail/order.h"

namespace banyan::trie {
namespace {

// What starting one more block costs beside its replayed tokens, in tokens: a half-filled row tile
// per layer.
constexpr int64_t kBlockCost = 64;

class Cutter {
 public:
  Cutter(const std::vector<Sample>& samples, const detail::Order& order, const PlanOptions& options)
      : order_(order), size_(static_cast<int32_t>(samples.size())), sums_(1, 0) {
    constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
    max_tokens_ = options.max_tokens_per_block > 0 ? options.max_tokens_per_block : kNoLimit;
    max_samples_ = options.max_samples_per_block > 0 ? options.max_samples_per_block : kNoLimit;
    for (int32_t i = 0; i < size_; ++i) {
      lengths_.push_back(static_cast<int64_t>(samples[order.samples[i]].tokens.size()));
      sums_.push_back(sums_.back() + lengths_[i] - order.shared[i]);
    }
  }

  int64_t num_unique() const { return sums_.back(); }

  // Unique tokens of the trie of samples [a, b).
  int64_t tokens(int32_t a, int32_t b) const { return sums_[b] - sums_[a] + order_.shared[a]; }

  // Within both limits, or all on one path that is longer than the budget by itself.
  bool fits(int32_t a, int32_t b) const {
    if (b - a > max_samples_) return false;
    const int64_t used = tokens(a, b);
    return used <= max_tokens_ || used == lengths_[b - 1];
  }

  // First sample of every block, ascending.
  std::vector<int32_t> starts() const {
    const std::vector<uint8_t> allowed = allowed_cuts();
    std::vector<int64_t> cost(size_ + 1, 0);  // best cost of the blocks in front of sample b
    std::vector<int32_t> from(size_ + 1, 0);  // start of the last of them
    std::deque<int32_t> queue;                // candidate starts, ascending cost
    const auto start_cost = [&](int32_t a) { return cost[a] + order_.shared[a] + kBlockCost; };
    int32_t lowest = 0;
    for (int32_t b = 0; b <= size_; ++b) {
      if (b > 0 && b < size_ && !allowed[b]) continue;
      if (b > 0) {
        while (!fits(lowest, b)) ++lowest;
        while (queue.front() < lowest) queue.pop_front();
        from[b] = queue.front();
        cost[b] = start_cost(from[b]);
      }
      if (b == size_) break;
      while (!queue.empty() && start_cost(queue.back()) > start_cost(b)) queue.pop_back();
      queue.push_back(b);
    }
    std::vector<int32_t> starts;
    for (int32_t b = size_; b > 0; b = from[b]) starts.push_back(from[b]);
    std::reverse(starts.begin(), starts.end());
    return starts;
  }

 private:
  std::vector<uint8_t> allowed_cuts() const {
    std::vector<int32_t> first(size_, 0);  // first sample of the subtree at the fork in front of i
    std::vector<int32_t> last(size_ + 1, size_);  // one behind its last
    std::vector<int32_t> stack;
    for (int32_t i = 1; i < size_; ++i) {
      while (!stack.empty() && order_.shared[stack.back()] >= order_.shared[i]) stack.pop_back();
      first[i] = stack.empty() ? 0 : stack.back();
      stack.push_back(i);
    }
    stack.clear();
    for (int32_t i = size_ - 1; i > 0; --i) {
      while (!stack.empty() && order_.shared[stack.back()] >= order_.shared[i]) stack.pop_back();
      last[i] = stack.empty() ? size_ : stack.back();
      stack.push_back(i);
    }
    std::vector<uint8_t> allowed(size_, 1);
    for (int32_t i = 1; i < size_; ++i) {
      allowed[i] = order_.shared[i] == 0 || !fits(first[i], last[i]);
    }
    return allowed;
  }

  const detail::Order& order_;
  int32_t size_;
  int64_t max_tokens_ = 0;
  int64_t max_samples_ = 0;
  std::vector<int64_t> lengths_;
  std::vector<int64_t> sums_;  // [S + 1] running sum of length - shared
};

Block make_block(const std::vector<Sample>& samples,
                 const detail::Order& order,
                 int32_t begin,
                 int32_t end) {
  Block block;
  block.samples.assign(order.samples.begin() + begin, order.samples.begin() + end);
  block.trie = detail::pack(samples, order, begin, end);
  std::vector<const Sample*> members;
  for (const int32_t s : block.samples) members.push_back(&samples[s]);
  block.edges = detail::edges_of(block.trie, members);
  return block;
}

void warn_long_paths(const std::vector<Sample>& samples, int64_t budget, Plan& plan) {
  for (const Block& block : plan.blocks) {
    if (budget == 0 || block.trie.num_tokens() <= budget) continue;
    for (const int32_t s : block.samples) {
      if (static_cast<int64_t>(samples[s].tokens.size()) <= budget) continue;
      plan.warnings.push_back(::banyan::detail::concat("sample ",
                                                       samples[s].uid,
                                                       ": ",
                                                       samples[s].tokens.size(),
                                                       " tokens exceed the budget of ",
                                                       budget,
                                                       "; it runs alone"));
    }
  }
}

}  // namespace

Plan plan(const std::vector<Sample>& samples, const PlanOptions& options) {
  BANYAN_CHECK(options.max_tokens_per_block >= 0,
               "[plan] max_tokens_per_block: wanted >= 0, got ",
               options.max_tokens_per_block);
  BANYAN_CHECK(options.max_samples_per_block >= 0,
               "[plan] max_samples_per_block: wanted >= 0, got ",
               options.max_samples_per_block);
  const detail::Order order = detail::order_samples(samples, options.build);
  Plan plan;
  if (samples.empty()) return plan;
  const Cutter cutter(samples, order, options);
  const std::vector<int32_t> starts = cutter.starts();
  for (size_t i = 0; i < starts.size(); ++i) {
    const bool final = i + 1 == starts.size();
    const auto end = final ? static_cast<int32_t>(samples.size()) : starts[i + 1];
    plan.blocks.push_back(make_block(samples, order, starts[i], end));
    for (const Action action : {Action::kForward, Action::kLoss, Action::kBackward}) {
      plan.entries.push_back({action, static_cast<int32_t>(i)});
    }
    plan.num_logical += plan.blocks.back().trie.num_logical;
    plan.num_computed += plan.blocks.back().trie.num_tokens();
  }
  plan.num_unique = cutter.num_unique();
  warn_long_paths(samples, options.max_tokens_per_block, plan);
  return plan;
}

}  // namespace banyan::trie
