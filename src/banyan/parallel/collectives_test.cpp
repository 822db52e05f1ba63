#include "banyan/parallel/collectives.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "banyan/testing/thread_transport.h"

namespace banyan::parallel {
namespace {

at::Tensor numbers(int64_t rank, int64_t count) {
  return at::arange(count, at::kFloat).mul_(0.37).add_(static_cast<double>(rank) * 1.3).sin_();
}

}  // namespace

TEST(Collectives, OneProcessPaysNothing) {
  Collectives alone;
  at::Tensor tensor = numbers(0, 5);
  const at::Tensor before = tensor.clone();
  alone.all_reduce_sum(tensor);
  alone.broadcast(tensor, 0);
  EXPECT_TRUE(at::equal(tensor, before));
  EXPECT_EQ(alone.all_gather(tensor).sizes(), (std::vector<int64_t>{1, 5}));
  EXPECT_EQ(alone.all_gather_bytes("text"), std::vector<std::string>{"text"});
  EXPECT_EQ(alone.broadcast_bytes("text", 0), "text");
  EXPECT_FALSE(alone.any(false));
  EXPECT_TRUE(alone.traffic().empty());
}

TEST(Collectives, SumsAddRanksInTheirOrder) {
  for (const int64_t size : {2, 3, 5}) {
    for (const int64_t count : {1, 7, 64}) {  // also where the ranks do not divide it
      at::Tensor wanted = numbers(0, count);
      for (int64_t r = 1; r < size; ++r) wanted.add_(numbers(r, count));
      testing::run_ranks(size, [&](Collectives& group) {
        at::Tensor tensor = numbers(group.rank(), count);
        group.all_reduce_sum(tensor);
        EXPECT_TRUE(at::equal(tensor, wanted)) << size << " ranks, " << count;
      });
    }
  }
}

TEST(Collectives, SmallFormatsAreAddedInFp32) {
  testing::run_ranks(3, [](Collectives& group) {
    // In bf16, 256 + 1 is 256.
    at::Tensor tensor = at::full({4}, group.rank() == 0 ? 256.0 : 1.0, at::kBFloat16);
    group.all_reduce_sum(tensor);
    EXPECT_EQ(tensor[0].item<double>(), 258.0);
  });
}

TEST(Collectives, AScatteredSumIsAPieceOfTheWholeOne) {
  testing::run_ranks(4, [](Collectives& group) {
    at::Tensor whole = numbers(group.rank(), 32);
    const at::Tensor piece = group.reduce_scatter_sum(whole);
    group.all_reduce_sum(whole);
    EXPECT_TRUE(at::equal(piece, whole.narrow(0, group.rank() * 8, 8)));
  });
}

TEST(Collectives, RowsFindTheirRanks) {
  testing::run_ranks(3, [](Collectives& group) {
    // Rank r sends r + c rows of value 10 r + c to rank c.
    const int64_t r = group.rank();
    std::vector<int64_t> in_sizes, out_sizes;
    std::vector<double> rows, wanted;
    for (int64_t c = 0; c < 3; ++c) {
      in_sizes.push_back(r + c);
      out_sizes.push_back(c + r);
      rows.insert(rows.end(), r + c, static_cast<double>(10 * r + c));
      wanted.insert(wanted.end(), c + r, static_cast<double>(10 * c + r));
    }
    const at::Tensor out =
        group.all_to_all(at::tensor(rows, at::kDouble).unsqueeze(1), out_sizes, in_sizes);
    EXPECT_TRUE(at::equal(out.squeeze(1), at::tensor(wanted, at::kDouble)));
  });
}

TEST(Collectives, TextsAndNumbersComeInRankOrder) {
  testing::run_ranks(3, [](Collectives& group) {
    const std::vector<std::string> texts =
        group.all_gather_bytes(std::string(group.rank(), 'a' + static_cast<char>(group.rank())));
    EXPECT_EQ(texts, (std::vector<std::string>{"", "b", "cc"}));
    EXPECT_EQ(group.all_gather_number(static_cast<double>(group.rank())),
              (std::vector<double>{0.0, 1.0, 2.0}));
    EXPECT_EQ(group.broadcast_bytes(group.rank() == 2 ? "from two" : "", 2), "from two");
    EXPECT_TRUE(group.any(group.rank() == 1));
    EXPECT_FALSE(group.any(false));
  });
}

TEST(Collectives, MessagesArriveInOrder) {
  testing::run_ranks(2, [](Collectives& group) {
    if (group.rank() == 0) {
      group.send(numbers(0, 3), 1);
      group.send(numbers(1, 3), 1);
    } else {
      at::Tensor first = at::zeros({3}), second = at::zeros({3});
      group.receive(first, 0);
      group.receive(second, 0);
      EXPECT_TRUE(at::equal(first, numbers(0, 3)));
      EXPECT_TRUE(at::equal(second, numbers(1, 3)));
    }
  });
}

// The formulas of the planner: 2 N (n - 1) / n bytes of a sum, N (n - 1) of a gather of N.
TEST(Collectives, BytesAreCounted) {
  testing::run_ranks(4, [](Collectives& group) {
    at::Tensor tensor = numbers(group.rank(), 64);
    group.all_reduce_sum(tensor);
    const auto& traffic = group.traffic();
    EXPECT_EQ(traffic.at("all_to_all").bytes + traffic.at("all_gather").bytes,
              2 * 64 * 4 * (4 - 1) / 4);
    EXPECT_EQ(traffic.at("all_to_all").calls, 1);
    group.broadcast(tensor, 1);
    EXPECT_EQ(traffic.at("broadcast").bytes, group.rank() == 1 ? 64 * 4 : 0);
  });
}

TEST(Collectives, AFailureNamesOperationGroupShapeAndRanks) {
  std::string text;
  try {
    testing::run_ranks(3, [](Collectives& group) {
      if (group.rank() == 2) return;  // never comes
      if (group.rank() == 1) throw RankError("rank 1 ends");
      group.all_gather(numbers(0, 6).view({2, 3}));
    });
  } catch (const RankError& error) {
    text = error.what();
  }
  EXPECT_EQ(text,
            "[parallel] all_gather of [2, 3] Float in group dp: rank 0 waited for ranks 1, 2 in "
            "vain: another rank has left");
}

}  // namespace banyan::parallel
