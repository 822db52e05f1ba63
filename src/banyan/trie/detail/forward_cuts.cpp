// A dynamic program over the places where a cut may fall: the starts of nodes, the ends of samples,
// and evenly spaced ones inside long chains. best(p) = min over q of best(q) + block that starts at
// q, with at most `budget` tokens and the sample limit between q and p; both ends of that window
// only move forward, so a monotone queue gives linear time.
#include "banyan/trie/detail/forward_cuts.h"

#include <algorithm>
#include <deque>

#include "banyan/trie/detail/cut_states.h"

namespace banyan::trie::detail {
namespace {

struct Place {
  int64_t token = 0;   // tokens in front of it
  int32_t depth = 0;   // path above it: what a block that starts here has carried in
  int32_t sample = 0;  // samples that end in front of it
};

constexpr int64_t kPartsOfBudget = 16;  // spacing inside a chain

std::vector<Place> list_places(const ForkTree& tree, const Limits& limits) {
  std::vector<Place> places;
  int64_t token = 0;
  for (size_t v = 1; v < tree.nodes().size(); ++v) {
    const ForkNode& node = tree.nodes()[v];
    std::vector<int32_t> depths = {node.start};
    if (node.end - node.start > limits.tokens / kPartsOfBudget) {
      const int64_t step = std::max<int64_t>(1, limits.tokens / kPartsOfBudget);
      for (int64_t d = node.start + step; d < node.end; d += step) {
        depths.push_back(static_cast<int32_t>(d));
      }
    }
    for (int32_t i = node.first; i < node.last && tree.length(i) < node.end; ++i) {
      depths.push_back(tree.length(i));
    }
    std::sort(depths.begin(), depths.end());
    depths.erase(std::unique(depths.begin(), depths.end()), depths.end());
    int32_t sample = node.first;
    for (const int32_t depth : depths) {
      while (sample < node.last && tree.length(sample) <= depth) ++sample;
      places.push_back({token + depth - node.start, depth, sample});
    }
    token += node.end - node.start;
  }
  places.push_back({token, 0, tree.num_samples()});
  return places;
}

}  // namespace

CutList cut_forward(const ForkTree& tree, const PlanOptions& options) {
  const Limits limits(options);
  const Prices prices(options.cost, tree);
  const std::vector<Place> places = list_places(tree, limits);
  std::vector<double> cost(places.size(), 0.0);
  std::vector<int32_t> from(places.size(), 0);
  std::deque<int32_t> queue;
  const auto start = [&](int32_t q) { return cost[q] + prices.block(places[q].depth); };
  for (int32_t p = 1; p < static_cast<int32_t>(places.size()); ++p) {
    while (!queue.empty() && start(queue.back()) > start(p - 1)) queue.pop_back();
    queue.push_back(p - 1);
    // Samples that end on one token stay together, whatever the limit.
    while (queue.front() != p - 1 &&
           (places[p].token - places[queue.front()].token > limits.tokens ||
            places[p].sample - places[queue.front()].sample > limits.samples)) {
      queue.pop_front();
    }
    from[p] = queue.front();
    cost[p] = start(from[p]);
  }
  CutList list;
  list.cost = cost.back();
  for (auto p = static_cast<int32_t>(places.size()) - 1; p > 0; p = from[p]) {
    CutBlock block;
    block.sample = places[from[p]].sample;
    block.carried = places[from[p]].depth;
    block.tokens = places[p].token - places[from[p]].token;
    list.blocks.push_back(block);
  }
  std::reverse(list.blocks.begin(), list.blocks.end());
  return list;
}

}  // namespace banyan::trie::detail
