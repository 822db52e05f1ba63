// sharing.mode=auto: does the trie cost less than its samples apart? By the cost model, for the
// whole batch under its limits, and for each tree by itself.
#include "banyan/trie/sharing_choice.h"

#include <algorithm>

#include "banyan/trie/detail/order.h"

namespace banyan::trie {
namespace {

double path_cost(const CostModel& cost, int64_t from, int64_t to) {
  const auto pairs = static_cast<double>(to * (to + 1) - from * (from + 1)) / 2.0;
  return cost.per_token * static_cast<double>(to - from) + cost.per_pair * pairs;
}

}  // namespace

namespace detail {

void unshare_trees(const std::vector<Sample>& samples,
                   const CostModel& cost,
                   double margin,
                   Order& order) {
  const size_t size = order.samples.size();
  for (size_t begin = 0; begin < size;) {
    size_t end = begin;
    double saved = 0.0, apart = 0.0;
    do {
      const auto length = static_cast<int64_t>(samples[order.samples[end]].tokens.size());
      apart += path_cost(cost, 0, length);
      saved += path_cost(cost, 0, order.shared[end]);
      ++end;
    } while (end < size && order.shared[end] > 0);
    if (saved < margin * apart) std::fill(&order.shared[begin], &order.shared[0] + end, 0);
    begin = end;
  }
}

}  // namespace detail

bool sharing_pays(const std::vector<Sample>& samples, const PlanOptions& options, double margin) {
  PlanOptions shared = options;
  shared.build.share = true;
  const Plan together = plan(samples, shared);
  if (together.num_unique == together.num_logical) return false;
  shared.build.share = false;
  const Plan apart = plan(samples, shared);
  return together.modelled_seconds <= (1.0 - margin) * apart.modelled_seconds;
}

}  // namespace banyan::trie
