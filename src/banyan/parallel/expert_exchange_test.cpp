// Rows reach the rank of their expert in the order [expert][source], and come back.
#include "banyan/parallel/expert_exchange.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <random>

#include "banyan/testing/thread_transport.h"

namespace banyan::parallel {
namespace {

// Row i of expert e of rank r: (e, r, i).
at::Tensor rows_of(int64_t rank, const std::vector<int64_t>& offsets) {
  at::Tensor rows = at::empty({offsets.back(), 3}, at::kDouble);
  double* to = rows.data_ptr<double>();
  for (size_t e = 0; e + 1 < offsets.size(); ++e) {
    for (int64_t i = offsets[e]; i < offsets[e + 1]; ++i) {
      *to++ = static_cast<double>(e);
      *to++ = static_cast<double>(rank);
      *to++ = static_cast<double>(i - offsets[e]);
    }
  }
  return rows;
}

TEST(ExpertExchange, RowsGoToTheirExpertsAndBack) {
  for (int seed = 0; seed < 12; ++seed) {
    const int64_t num_ranks = 1 + seed % 4;
    const int64_t num_experts = num_ranks * (1 + seed % 3);
    std::mt19937 random(seed);
    std::vector<std::vector<int64_t>> offsets(num_ranks);
    for (int64_t r = 0; r < num_ranks; ++r) {
      offsets[r] = {0};
      for (int64_t e = 0; e < num_experts; ++e) {
        const bool idle = r == 1 && seed % 2 == 0;  // a rank without rows
        offsets[r].push_back(offsets[r].back() + (idle ? 0 : random() % 4));
      }
    }
    testing::run_ranks(num_ranks, [&](Collectives& ranks) {
      const at::Tensor rows = rows_of(ranks.rank(), offsets[ranks.rank()]);
      const ExpertExchange exchange(ranks, offsets[ranks.rank()]);
      const at::Tensor came = exchange.to_experts(rows);
      const int64_t own = num_experts / num_ranks;
      int64_t at = 0;
      for (int64_t e = 0; e < own; ++e) {
        ASSERT_EQ(exchange.offsets()[e], at);
        const int64_t expert = ranks.rank() * own + e;
        for (int64_t source = 0; source < num_ranks; ++source) {
          const int64_t count = offsets[source][expert + 1] - offsets[source][expert];
          for (int64_t i = 0; i < count; ++i, ++at) {
            ASSERT_EQ(came[at][0].item<double>(), expert);
            ASSERT_EQ(came[at][1].item<double>(), source);
            ASSERT_EQ(came[at][2].item<double>(), i);
          }
        }
      }
      ASSERT_EQ(came.size(0), at);
      ASSERT_TRUE(exchange.to_tokens(came).equal(rows));
      if (num_ranks == 1) return;
      const std::vector<int64_t>& mine = offsets[ranks.rank()];
      const int64_t kept = mine[(ranks.rank() + 1) * own] - mine[ranks.rank() * own];
      const int64_t others = (rows.size(0) - kept) + (came.size(0) - kept);  // out, and back
      ASSERT_EQ(ranks.traffic().at("all_gather").bytes, 8 * num_experts * (num_ranks - 1));
      ASSERT_EQ(ranks.traffic().at("all_to_all").bytes, 3 * 8 * others);
    });
  }
}

// Two runs of experts, of which two ranks hold a part each: both get the rows of both, and what
// they give for a row is added where it came from. Bytes are those of docs/guides/scale_out.md.
TEST(ExpertExchange, RanksWithPartsOfTheSameExpertsTellEachOtherTheirRows) {
  constexpr int64_t kExperts = 4;
  testing::run_mesh(4, {.ep = 2, .etp = 2}, [&](Groups& groups) {
    std::mt19937 random(groups.world.rank());
    std::vector<int64_t> offsets = {0};
    for (int64_t e = 0; e < kExperts; ++e) offsets.push_back(offsets.back() + random() % 5);
    const at::Tensor rows = rows_of(groups.world.rank(), offsets);
    const ExpertExchange exchange(groups.expert, offsets, &groups.expert_tensor);
    const at::Tensor came = exchange.to_experts(rows);
    const int64_t own = kExperts / 2;
    ASSERT_EQ(came.size(0), exchange.offsets()[own]);
    int64_t last_expert = -1;
    for (int64_t i = 0; i < came.size(0); ++i) {
      const auto expert = static_cast<int64_t>(came[i][0].item<double>());
      EXPECT_GE(expert, last_expert);
      EXPECT_EQ(expert / own, groups.expert.rank());
      last_expert = expert;
    }
    // Parts that give once and twice the row: three times.
    const at::Tensor back = exchange.to_tokens(came.mul(1 + groups.expert_tensor.rank()));
    EXPECT_TRUE(back.equal(rows.mul(3)));

    constexpr int64_t kRowBytes = 3 * 8;
    const int64_t all = came.size(0);  // of both
    const auto& traffic = groups.expert_tensor.traffic();
    EXPECT_EQ(traffic.at("all_gather").bytes, 8 * own);
    EXPECT_EQ(traffic.at("all_to_all").bytes, all * kRowBytes);  // own rows there, others' back
  });
}

}  // namespace
}  // namespace banyan::parallel
