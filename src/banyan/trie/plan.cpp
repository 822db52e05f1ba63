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
#include "banyan/trie/detail/assemble.h"
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

void check_options(const PlanOptions& options) {
  const auto check = [](const char* name, int64_t limit) {
    BANYAN_CHECK(limit >= 0, "[plan] ", name, ": wanted >= 0, got ", limit);
  };
  check("max_tokens_per_block", options.max_tokens_per_block);
  check("max_samples_per_block", options.max_samples_per_block);
  check("max_path_tokens", options.max_path_tokens);
}

int64_t unique_tokens(const std::vector<Sample>& samples, const detail::Order& order) {
  int64_t tokens = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    tokens += static_cast<int64_t>(samples[order.samples[i]].tokens.size()) - order.shared[i];
  }
  return tokens;
}

}  // namespace

Plan plan(const std::vector<Sample>& samples, const PlanOptions& options) {
  check_options(options);
  detail::Cuts cuts;
  cuts.order = detail::order_samples(samples, options.build);
  if (samples.empty()) return {};
  const int64_t num_unique = unique_tokens(samples, cuts.order);
  const Cutter cutter(samples, cuts.order, options);
  const std::vector<int32_t> starts = cutter.starts();
  for (size_t i = 0; i < starts.size(); ++i) {
    const auto size = static_cast<int32_t>(samples.size());
    const int32_t end = i + 1 == starts.size() ? size : starts[i + 1];
    const int32_t before = cuts.ends.empty() ? 0 : cuts.ends.back();
    cuts.ends.push_back(before + static_cast<int32_t>(cutter.tokens(starts[i], end)));
    cuts.policies.push_back(CarryPolicy::kRetain);
  }
  for (const int32_t start : starts) cuts.order.shared[start] = 0;
  Plan plan = detail::assemble(samples, cuts, options);
  plan.num_unique = num_unique;
  warn_long_paths(samples, options.max_tokens_per_block, plan);
  return plan;
}

Plan plan_with_cuts(const std::vector<Sample>& samples,
                    const std::vector<int32_t>& positions,
                    CarryPolicy policy,
                    const PlanOptions& options) {
  check_options(options);
  detail::Cuts cuts;
  cuts.order = detail::order_samples(samples, options.build);
  if (samples.empty()) return {};
  const int64_t num_unique = unique_tokens(samples, cuts.order);
  int64_t last = 0;
  for (const int32_t position : positions) {
    BANYAN_CHECK(last < position && position < num_unique,
                 "[plan] cut: wanted ascending positions inside (0, ",
                 num_unique,
                 "), got ",
                 position);
    last = position;
  }
  cuts.ends = positions;
  cuts.ends.push_back(static_cast<int32_t>(num_unique));
  cuts.policies.assign(cuts.ends.size(), policy);
  Plan plan = detail::assemble(samples, cuts, options);
  plan.num_unique = num_unique;
  return plan;
}

Counts counts_of(const Plan& plan) {
  Counts counts;
  counts.blocks = static_cast<int64_t>(plan.blocks.size());
  counts.tokens = plan.num_computed;
  counts.pairs = plan.num_pairs;
  counts.carried = plan.num_carried;
  counts.recomputed = plan.num_recomputed;
  for (const Block& block : plan.blocks) {
    counts.head_rows += static_cast<int64_t>(block.edges.source.size());
    for (const Segment& segment : block.trie.segments) {
      const bool own = segment.begin >= block.num_carried;
      counts.forks += own && block.trie.par[segment.begin] != segment.begin - 1 ? 1 : 0;
    }
  }
  return counts;
}

}  // namespace banyan::trie
