#include "banyan/parallel/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "banyan/core/rng.h"

namespace banyan::parallel {

TEST(Balance, EachPieceGoesToOneRank) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const int64_t num_ranks = 1 + philox(seed, 0, 0)[0] % 6;
    std::vector<double> costs(philox(seed, 1, 0)[0] % 20);
    for (size_t i = 0; i < costs.size(); ++i) costs[i] = philox(seed, i, 1)[0] % 1000;
    const Balance found = balance(costs, num_ranks);
    ASSERT_EQ(found.pieces.size(), static_cast<size_t>(num_ranks));
    std::set<int64_t> seen;
    double dearest = 0.0;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      double load = 0.0;
      for (const int64_t piece : found.pieces[rank]) {
        EXPECT_TRUE(seen.insert(piece).second);
        load += costs[piece];
      }
      EXPECT_DOUBLE_EQ(found.load[rank], load);
      dearest = std::max(dearest, load);
    }
    EXPECT_EQ(seen.size(), costs.size());
    // Graham's first bound: mean load and one more piece.
    const double sum = std::accumulate(costs.begin(), costs.end(), 0.0);
    const double most = costs.empty() ? 0.0 : *std::max_element(costs.begin(), costs.end());
    EXPECT_LE(dearest, sum / static_cast<double>(num_ranks) + most);
  }
}

TEST(Balance, TheDearestComesFirst) {
  const Balance found = balance({1.0, 5.0, 3.0, 3.0}, 2);
  EXPECT_EQ(found.pieces, (std::vector<std::vector<int64_t>>{{0, 1}, {2, 3}}));
  EXPECT_DOUBLE_EQ(imbalance(found.load), 1.0);
}

TEST(Balance, ARankMayStayIdle) {
  const Balance found = balance({4.0}, 3);
  EXPECT_EQ(found.pieces, (std::vector<std::vector<int64_t>>{{0}, {}, {}}));
  EXPECT_DOUBLE_EQ(imbalance(found.load), 3.0);
  EXPECT_DOUBLE_EQ(imbalance({0.0, 0.0}), 1.0);
}

}  // namespace banyan::parallel
