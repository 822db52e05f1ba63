// Depth-first branch and bound over the next block: an open chain of the next sample's path, to
// some segment end, or a closed run of samples; both begin behind the deepest token that is carried
// anyway.
#include "banyan/trie/detail/small_search.h"

#include <algorithm>

#include "banyan/trie/detail/cut_states.h"

namespace banyan::trie::detail {
namespace {

constexpr int32_t kMaxSamples = 16;
constexpr int32_t kMaxSteps = 20000;

class Search {
 public:
  Search(const ForkTree& tree, const PlanOptions& options, CutList& best)
      : tree_(tree), limits_(options), prices_(options.cost, tree), best_(best) {
    for (int32_t i = 0; i < tree.num_samples(); ++i) ends_.push_back(segment_ends(i));
  }

  void run() { next_block(0, 0.0, {}, /*fresh=*/false); }

 private:
  // Open block above: its tokens have depths [begin, end), those up to `cover` are still ancestors
  // of what comes.
  struct Open {
    int64_t begin, end, cover;
    bool retained;
  };
  using Stack = std::vector<Open>;

  // Depths at which segments of sample i's path end: forks and ends of samples.
  std::vector<int32_t> segment_ends(int32_t i) const {
    std::vector<int32_t> ends = {tree_.length(i)};
    int32_t common = tree_.length(i);
    for (int32_t k = i; k > 0; --k) {
      common = std::min(common, tree_.shared(k));
      ends.push_back(common);
    }
    common = tree_.length(i);
    for (int32_t k = i + 1; k < tree_.num_samples(); ++k) {
      common = std::min(common, tree_.shared(k));
      ends.push_back(common);
    }
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    return ends;
  }

  static void leave(Stack& stack, int64_t depth) {
    while (!stack.empty() && stack.back().begin >= depth) stack.pop_back();
    for (Open& open : stack) open.cover = std::min(open.cover, depth);
  }

  // Plans everything from sample `at` on. `fresh`: the chain on top of the stack is its own path.
  void next_block(int32_t at, double cost, Stack stack, bool fresh) {
    const int32_t size = tree_.num_samples();
    if (at == size && cost < best_.cost) {
      best_.cost = cost;
      best_.blocks = blocks_;
      best_.forced = 0;
    }
    const double least = at < size ? prices_.block(0) : 0.0;
    if (at == size || cost + least >= best_.cost || ++steps_ > kMaxSteps) return;
    if (!fresh) leave(stack, tree_.shared(at));
    CutBlock block;
    block.sample = at;
    block.carried = stack.empty() ? 0 : static_cast<int32_t>(stack.back().cover);
    for (const Open& open : stack) block.retained += open.retained ? open.end - open.begin : 0;
    cost += prices_.block(block.carried);
    if (!fresh) cost += prices_.copy(at, block.carried, tree_.shared(at));
    close(block, cost, stack);
    for (const int32_t end : ends_[at]) open(block, end, cost, stack);
  }

  void close(CutBlock block, double cost, Stack stack) {
    for (int32_t last = block.sample + 1; last <= tree_.num_samples(); ++last) {
      block.tokens = tree_.tokens(block.sample, last) - block.carried;
      if (block.tokens + block.retained > limits_.tokens) return;
      if (last - block.sample > limits_.samples) return;
      blocks_.push_back(block);
      next_block(last, cost, stack, /*fresh=*/false);
      blocks_.pop_back();
      if (last < tree_.num_samples()) leave(stack, tree_.shared(last));
    }
  }

  void open(CutBlock block, int32_t end, double cost, const Stack& stack) {
    block.tokens = end - block.carried;
    if (block.tokens <= 0 || block.tokens + block.retained > limits_.tokens) return;
    int32_t next = block.sample;  // behind the samples that end on the chain
    while (next < tree_.num_samples() && tree_.length(next) <= end) {
      ++next;
      if (next < tree_.num_samples() && tree_.shared(next) < tree_.length(next - 1)) return;
    }
    const bool leads_on =
        next < tree_.num_samples() && (next == block.sample || tree_.shared(next) >= end);
    if (!leads_on || next - block.sample > limits_.samples) return;
    block.open = true;
    for (const bool retained : {true, false}) {
      block.policy = retained ? CarryPolicy::kRetain : CarryPolicy::kRecompute;
      Stack deeper = stack;
      deeper.push_back({block.carried, end, end, retained});
      blocks_.push_back(block);
      const double again = retained ? 0.0 : prices_.recompute(block.tokens);
      next_block(next, cost + again, std::move(deeper), /*fresh=*/true);
      blocks_.pop_back();
    }
  }

  const ForkTree& tree_;
  const Limits limits_;
  const Prices prices_;
  CutList& best_;
  std::vector<std::vector<int32_t>> ends_;  // per sample
  std::vector<CutBlock> blocks_;
  int32_t steps_ = 0;
};

}  // namespace

void search_small(const ForkTree& tree, const PlanOptions& options, CutList& list) {
  if (options.carry != Carry::kAuto || list.blocks.size() < 2) return;
  if (tree.num_samples() <= kMaxSamples) Search(tree, options, list).run();
}

}  // namespace banyan::trie::detail
