#include "banyan/parallel/groups.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "banyan/testing/thread_transport.h"

namespace banyan::parallel {

// tp fastest: ranks 0 1 | 2 3 share the samples, 0 2 | 1 3 hold equal parts.
TEST(Groups, EachAxisSumsOverItsOwnRanks) {
  testing::run_mesh(4, {.tp = 2}, [](Groups& groups) {
    EXPECT_EQ(groups.world.size(), 4);
    EXPECT_EQ(groups.tensor.size(), 2);
    EXPECT_EQ(groups.data.size(), 2);
    EXPECT_TRUE(groups.pipeline.is_alone());
    EXPECT_FALSE(holds_whole_model(groups));
    const int64_t rank = groups.world.rank();
    at::Tensor over_tensor = at::full({3}, static_cast<double>(rank), at::kDouble);
    groups.tensor.all_reduce_sum(over_tensor);
    EXPECT_EQ(over_tensor[0].item<double>(), rank < 2 ? 1.0 : 5.0);
    at::Tensor over_data = at::full({3}, static_cast<double>(rank), at::kDouble);
    groups.data.all_reduce_sum(over_data);
    EXPECT_EQ(over_data[0].item<double>(), rank % 2 == 0 ? 2.0 : 4.0);
    // Padded to four numbers of 8 bytes: two to the other rank, and two sums back.
    EXPECT_EQ(sent_bytes(groups).at("tp/all_to_all"), 16);
    EXPECT_EQ(sent_bytes(groups).at("dp/all_gather"), 16);
    const auto before = sent_bytes(groups);
    groups.data.all_reduce_sum(over_data);
    groups.world.any(false);
    const auto since = sent_bytes_since(before, groups);
    EXPECT_EQ(since.at("tp/all_to_all"), 0);
    EXPECT_EQ(since.at("dp/all_gather"), 16);
    EXPECT_EQ(since.at("world/all_gather"), sent_bytes(groups).at("world/all_gather"));
  });
}

TEST(Groups, OneProcessIsAlone) {
  const Groups groups = make_groups(Mesh(1, {}), 0, nullptr);
  EXPECT_TRUE(groups.world.is_alone());
  EXPECT_TRUE(holds_whole_model(groups));
  EXPECT_TRUE(sent_bytes(groups).empty());
}

}  // namespace banyan::parallel
