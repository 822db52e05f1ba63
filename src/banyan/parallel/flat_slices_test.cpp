#include "banyan/parallel/flat_slices.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "banyan/core/rng.h"
#include "banyan/testing/thread_transport.h"

namespace banyan::parallel {

TEST(FlatSlices, EveryNumberHasOneOwner) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    std::vector<int64_t> sizes(1 + philox(seed, 0, 0)[0] % 6);
    for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = philox(seed, i, 1)[0] % 40;
    const int64_t num_ranks = 1 + philox(seed, 0, 2)[0] % 5;
    const FlatSlices slices(sizes, num_ranks, 1 + philox(seed, 0, 3)[0] % 50);
    std::vector<std::vector<int>> owners;
    for (const int64_t size : sizes) owners.emplace_back(size, 0);
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      for (const Range& range : slices.owned(rank)) {
        EXPECT_GT(range.count, 0);
        for (int64_t k = 0; k < range.count; ++k) ++owners[range.tensor].at(range.begin + k);
      }
    }
    for (const std::vector<int>& tensor : owners) {
      for (const int count : tensor) EXPECT_EQ(count, 1) << "seed " << seed;
    }
  }
}

// Sums stay with their owners until they are gathered.
TEST(FlatSlices, OnlyOwnNumbersAreReduced) {
  testing::run_ranks(2, [](Collectives& ranks) {
    const FlatSlices slices({3, 5}, 2, 4);  // buckets [0, 4) and [4, 8)
    std::vector<at::Tensor> tensors = {at::zeros({3}), at::zeros({5})};
    for (at::Tensor& tensor : tensors) tensor.fill_(static_cast<double>(1 + ranks.rank()));
    slices.reduce(tensors, ranks);
    const double own = 3.0, other = static_cast<double>(1 + ranks.rank());
    const bool first = ranks.rank() == 0;
    const std::vector<double> wanted = {first ? own : other,
                                        first ? own : other,
                                        first ? other : own,
                                        first ? other : own,
                                        first ? own : other,
                                        first ? own : other,
                                        first ? other : own,
                                        first ? other : own};
    for (int64_t k = 0; k < 8; ++k) {
      const double got = (k < 3 ? tensors[0][k] : tensors[1][k - 3]).item<double>();
      EXPECT_EQ(got, wanted[k]) << k;
    }
    slices.gather(tensors, ranks);
    for (const at::Tensor& tensor : tensors) EXPECT_EQ(tensor.min().item<double>(), 3.0);
    for (const at::Tensor& tensor : tensors) EXPECT_EQ(tensor.max().item<double>(), 3.0);
  });
}

}  // namespace banyan::parallel
