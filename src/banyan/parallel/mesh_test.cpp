#include "banyan/parallel/mesh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>

namespace banyan::parallel {
namespace {

std::vector<Axis> all_axes() {
  std::vector<Axis> axes;
  for (int64_t axis = 0; axis < kNumAxes; ++axis) axes.push_back(static_cast<Axis>(axis));
  return axes;
}

// Every shape of up to `most` ranks whose sizes divide.
template <typename Check>
void for_each_mesh(int64_t most, const Check& check) {
  for (int64_t world = 1; world <= most; ++world) {
    for (int64_t tp = 1; tp <= world; ++tp) {
      for (int64_t cp = 1; cp <= world; ++cp) {
        for (int64_t pp = 1; pp <= world; ++pp) {
          if (world % (tp * cp * pp) != 0) continue;
          for (int64_t ep = 1; ep <= world; ++ep) {
            if (world % (tp * ep * pp) != 0) continue;
            check(Mesh(world, {.tp = tp, .cp = cp, .ep = ep, .pp = pp, .etp = tp}), world);
          }
        }
      }
    }
  }
}

std::string message_of(int64_t world, const MeshShape& shape) {
  try {
    Mesh(world, shape);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST(Mesh, TheGroupsOfAnAxisPartitionTheWorld) {
  for_each_mesh(16, [](const Mesh& mesh, int64_t world) {
    for (const Axis axis : all_axes()) {
      std::vector<int64_t> seen(world, 0);
      for (int64_t rank = 0; rank < world; ++rank) {
        const std::vector<int64_t> ranks = mesh.ranks_of(axis, rank);
        EXPECT_EQ(std::count(ranks.begin(), ranks.end(), rank), 1);
        EXPECT_TRUE(std::is_sorted(ranks.begin(), ranks.end()));
        for (const int64_t other : ranks) EXPECT_EQ(mesh.ranks_of(axis, other), ranks);
        if (ranks.front() == rank) {
          for (const int64_t other : ranks) ++seen[other];
        }
      }
      EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), world) << axis_name(axis);
    }
  });
}

TEST(Mesh, SizesMultiplyToTheWorld) {
  for_each_mesh(16, [](const Mesh& mesh, int64_t world) {
    const auto size = [&](Axis axis) { return mesh.size(axis); };
    EXPECT_EQ(size(Axis::kTp) * size(Axis::kCp) * size(Axis::kDp) * size(Axis::kPp), world);
    EXPECT_EQ(size(Axis::kEtp) * size(Axis::kEp) * size(Axis::kEdp) * size(Axis::kPp), world);
    EXPECT_EQ(size(Axis::kShard) * size(Axis::kReplica), size(Axis::kDpCp));
  });
}

TEST(Mesh, EachGroupIsListedOnceAndFoundByItsRanks) {
  for_each_mesh(16, [](const Mesh& mesh, int64_t world) {
    std::set<std::vector<int64_t>> listed;
    for (const MeshGroup& group : mesh.groups()) {
      EXPECT_GE(group.ranks.size(), 2U);
      EXPECT_TRUE(listed.insert(group.ranks).second);
    }
    for (const Axis axis : all_axes()) {
      for (int64_t rank = 0; rank < world; ++rank) {
        const int64_t found = mesh.group_of(axis, rank);
        const std::vector<int64_t> ranks = mesh.ranks_of(axis, rank);
        if (ranks.size() == 1) {
          EXPECT_EQ(found, -1);
        } else {
          ASSERT_GE(found, 0);
          EXPECT_EQ(mesh.groups()[found].ranks, ranks);
        }
      }
    }
  });
}

TEST(Mesh, TheOrderIsTensorContextExpertDataPipeline) {
  const Mesh mesh(16, {.tp = 2, .cp = 2, .ep = 4, .pp = 2, .etp = 2});
  EXPECT_EQ(mesh.ranks_of(Axis::kTp, 0), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(mesh.ranks_of(Axis::kCp, 1), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(mesh.ranks_of(Axis::kDp, 0), (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(mesh.ranks_of(Axis::kPp, 5), (std::vector<int64_t>{5, 13}));
  EXPECT_EQ(mesh.ranks_of(Axis::kDpCp, 0), (std::vector<int64_t>{0, 2, 4, 6}));
  EXPECT_EQ(mesh.ranks_of(Axis::kEp, 1), (std::vector<int64_t>{1, 3, 5, 7}));
  EXPECT_EQ(mesh.ranks_of(Axis::kEdp, 1), (std::vector<int64_t>{1}));
  EXPECT_EQ(mesh.ranks_of(Axis::kModel, 2), (std::vector<int64_t>{2, 3, 10, 11}));
  EXPECT_EQ(mesh.describe(7), "rank 7 (tp 1, cp 1, dp 1, pp 0)");
}

TEST(Mesh, TiedEmbeddingsStandOnTheFirstAndTheLastStage) {
  const Mesh mesh(8, {.tp = 2, .pp = 4, .etp = 2});
  EXPECT_EQ(mesh.ranks_of(Axis::kEmbedding, 1), (std::vector<int64_t>{1, 7}));
  EXPECT_EQ(mesh.ranks_of(Axis::kEmbedding, 3), (std::vector<int64_t>{3}));
}

TEST(Mesh, HybridShardingCutsNeighbours) {
  const Mesh mesh(8, {.shard = 4});
  EXPECT_EQ(mesh.ranks_of(Axis::kShard, 5), (std::vector<int64_t>{4, 5, 6, 7}));
  EXPECT_EQ(mesh.ranks_of(Axis::kReplica, 5), (std::vector<int64_t>{1, 5}));
}

TEST(Mesh, RanksThatOnlyGenerateComeLast) {
  const Mesh mesh(7, {.tp = 2, .rollout = 3});
  EXPECT_EQ(mesh.ranks_of(Axis::kWorld, 0), (std::vector<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(mesh.ranks_of(Axis::kDp, 1), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(mesh.ranks_of(Axis::kRollout, 5), (std::vector<int64_t>{4, 5, 6}));
  EXPECT_EQ(mesh.ranks_of(Axis::kHandOver, 6), (std::vector<int64_t>{0, 4, 5, 6}));
  EXPECT_EQ(mesh.ranks_of(Axis::kHandOver, 2), (std::vector<int64_t>{2}));
  EXPECT_EQ(mesh.ranks_of(Axis::kTp, 4), (std::vector<int64_t>{4}));
  EXPECT_EQ(mesh.describe(5), "rank 5 (rollout 1)");
  EXPECT_EQ(Mesh(2, {.rollout = 1}).groups().size(), 1U);
}

// Whoever generates is cut into neighbours for it, whatever the axes of the training.
TEST(Mesh, TheRolloutHasNeighboursOfItsOwn) {
  const Mesh together(8, {.tp = 2, .pp = 2, .etp = 2, .rollout_tp = 4, .rollout_ep = 8});
  EXPECT_EQ(together.ranks_of(Axis::kRolloutTp, 6), (std::vector<int64_t>{4, 5, 6, 7}));
  EXPECT_EQ(together.ranks_of(Axis::kRolloutEp, 6).size(), 8U);
  const Mesh apart(7, {.tp = 3, .etp = 3, .rollout = 4, .rollout_tp = 2});
  EXPECT_EQ(apart.ranks_of(Axis::kRolloutTp, 2), (std::vector<int64_t>{2}));
  EXPECT_EQ(apart.ranks_of(Axis::kRolloutTp, 3), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(apart.ranks_of(Axis::kRolloutTp, 6), (std::vector<int64_t>{5, 6}));
  // Neighbours in both are one group.
  const Mesh alike(4, {.tp = 2, .etp = 2, .rollout_tp = 2});
  EXPECT_EQ(alike.group_of(Axis::kRolloutTp, 3), alike.group_of(Axis::kTp, 3));
}

TEST(Mesh, OneProcessHasNoGroup) {
  const Mesh mesh(1, {});
  EXPECT_TRUE(mesh.groups().empty());
  EXPECT_EQ(mesh.describe(0), "rank 0");
}

TEST(Mesh, DataParallelRanksShareOneGroup) {
  const Mesh mesh(4, {});
  ASSERT_EQ(mesh.groups().size(), 1U);
  EXPECT_EQ(mesh.groups()[0].ranks, (std::vector<int64_t>{0, 1, 2, 3}));
}

TEST(Mesh, SizesThatDoNotFitAreNamed) {
  const std::string megatron = "[config] actor_rollout_ref.actor.megatron.";
  EXPECT_EQ(
      message_of(6, {.tp = 4}),
      megatron +
          "tensor_model_parallel_size: wanted a divisor of the number of processes (6), got 4");
  EXPECT_EQ(message_of(6, {.cp = 2, .pp = 2}),
            megatron +
                "context_parallel_size (or actor_rollout_ref.actor.ulysses_sequence_parallel_size) "
                "x actor_rollout_ref.actor.megatron.pipeline_model_parallel_size: wanted a divisor "
                "of the number of "
                "processes (6), got 4");
  EXPECT_EQ(
      message_of(6, {.ep = 4}),
      megatron +
          "expert_model_parallel_size: wanted a divisor of the number of processes (6), got 4");
  EXPECT_EQ(message_of(6, {.tp = 4, .finetunes = true}),
            "[config] engine.tensor_model_parallel_size: wanted a divisor of the number of "
            "processes (6), got 4");
  EXPECT_EQ(message_of(6, {.pp = 0}),
            megatron + "pipeline_model_parallel_size: wanted >= 1, got 0");
  EXPECT_EQ(message_of(8, {.shard = 3}),
            "[config] actor_rollout_ref.actor.fsdp_config.fsdp_size: wanted a divisor of data x "
            "context parallel size (8), got 3");
  EXPECT_EQ(message_of(8, {.shard = 3, .finetunes = true}),
            "[config] engine.fsdp_size: wanted a divisor of data x context parallel size (8), got "
            "3");
  EXPECT_EQ(message_of(2, {.rollout = 2}),
            "[config] actor_rollout_ref.rollout.nnodes x n_gpus_per_node: wanted fewer than the "
            "processes (2), got 2");
  EXPECT_EQ(message_of(6, {.rollout_tp = 4}),
            "[config] actor_rollout_ref.rollout.tensor_model_parallel_size: wanted a divisor of "
            "the number of processes that generate (6), got 4");
  EXPECT_EQ(message_of(6, {.rollout = 3, .rollout_ep = 2}),
            "[config] actor_rollout_ref.rollout.expert_parallel_size: wanted a divisor of the "
            "number of processes that generate (3), got 2");
  EXPECT_EQ(message_of(0, {}), "[parallel] processes: wanted >= 1, got 0");
}

}  // namespace banyan::parallel
