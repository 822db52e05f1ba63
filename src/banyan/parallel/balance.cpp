#include "banyan/parallel/balance.h"

#include <algorithm>
#include <numeric>

namespace banyan::parallel {

Balance balance(const std::vector<double>& costs, int64_t num_ranks) {
  Balance out{std::vector<std::vector<int64_t>>(num_ranks), std::vector<double>(num_ranks, 0.0)};
  std::vector<int64_t> order(costs.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(
      order.begin(), order.end(), [&](int64_t a, int64_t b) { return costs[a] > costs[b]; });
  for (const int64_t piece : order) {
    const auto least = std::min_element(out.load.begin(), out.load.end());
    *least += costs[piece];
    out.pieces[least - out.load.begin()].push_back(piece);
  }
  for (std::vector<int64_t>& pieces : out.pieces) std::sort(pieces.begin(), pieces.end());
  return out;
}

double imbalance(const std::vector<double>& load) {
  const double sum = std::accumulate(load.begin(), load.end(), 0.0);
  if (sum <= 0.0) return 1.0;
  return *std::max_element(load.begin(), load.end()) * static_cast<double>(load.size()) / sum;
}

}  // namespace banyan::parallel
