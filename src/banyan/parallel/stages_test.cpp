#include "banyan/parallel/stages.h"

#include <gtest/gtest.h>

#include <string>

namespace banyan::parallel {
namespace {

using Ranges = std::vector<LayerRange>;

std::string refusal(int64_t layers, const StageSplit& split) {
  try {
    split_layers(layers, split);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

// A split with one thing changed.
template <typename Change>
StageSplit with(int64_t ranks, const Change& change) {
  StageSplit split{.pipeline_model_parallel_size = ranks};
  change(split);
  return split;
}

void expect_refused(const StageSplit& split, const std::string& text, int64_t layers = 8) {
  EXPECT_NE(refusal(layers, split).find(text), std::string::npos) << refusal(layers, split);
}

TEST(Stages, EqualOnesAndChunksInTheOrderOfTheLayers) {
  EXPECT_EQ(split_layers(3, {}), (Ranges{{0, 3}}));
  EXPECT_EQ(split_layers(6, {.pipeline_model_parallel_size = 3}), (Ranges{{0, 2}, {2, 4}, {4, 6}}));
  const Ranges four = {{0, 2}, {2, 4}, {4, 6}, {6, 8}};
  EXPECT_EQ(split_layers(
                8, {.pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 2}),
            four);
  EXPECT_EQ(split_layers(
                8, {.pipeline_model_parallel_size = 2, .num_layers_per_virtual_pipeline_stage = 2}),
            four);
}

TEST(Stages, FirstAndLastMayHaveOtherSizes) {
  EXPECT_EQ(split_layers(7,
                         {.pipeline_model_parallel_size = 3,
                          .num_layers_in_first_pipeline_stage = 1,
                          .num_layers_in_last_pipeline_stage = 2}),
            (Ranges{{0, 1}, {1, 5}, {5, 7}}));
  EXPECT_EQ(
      split_layers(7, with(3, [](StageSplit& s) { s.num_layers_in_last_pipeline_stage = 1; })),
      (Ranges{{0, 3}, {3, 6}, {6, 7}}));
  EXPECT_EQ(split_layers(6,
                         {.pipeline_model_parallel_size = 2,
                          .virtual_pipeline_model_parallel_size = 2,
                          .num_layers_in_first_pipeline_stage = 4,
                          .num_layers_in_last_pipeline_stage = 2}),
            (Ranges{{0, 2}, {2, 3}, {3, 5}, {5, 6}}));
}

TEST(Stages, EmbeddingAndLossCountAsLayers) {
  const auto both = [](StageSplit& s) {
    s.account_for_embedding_in_pipeline_split = s.account_for_loss_in_pipeline_split = true;
  };
  EXPECT_EQ(split_layers(4, with(3, both)), (Ranges{{0, 1}, {1, 3}, {3, 4}}));
  // Stages without a layer have the embedding, or the head.
  EXPECT_EQ(split_layers(1, with(3, both)), (Ranges{{0, 0}, {0, 1}, {1, 1}}));
  EXPECT_EQ(split_layers(6,
                         with(2,
                              [&](StageSplit& s) {
                                both(s);
                                s.virtual_pipeline_model_parallel_size = 2;
                              })),
            (Ranges{{0, 1}, {1, 3}, {3, 5}, {5, 6}}));
}

TEST(Stages, RangesCoverAllLayersOnceInOrder) {
  for (int64_t layers = 1; layers <= 24; ++layers) {
    for (int64_t ranks = 2; ranks <= 4; ++ranks) {
      for (int64_t chunks = 1; chunks <= 3; ++chunks) {
        for (int accounts = 0; accounts < 4; ++accounts) {
          const StageSplit split{.pipeline_model_parallel_size = ranks,
                                 .virtual_pipeline_model_parallel_size = chunks,
                                 .account_for_embedding_in_pipeline_split = accounts % 2 > 0,
                                 .account_for_loss_in_pipeline_split = accounts / 2 > 0};
          if (!refusal(layers, split).empty()) continue;
          const Ranges ranges = split_layers(layers, split);
          ASSERT_EQ(static_cast<int64_t>(ranges.size()), ranks * chunks);
          int64_t next = 0;
          for (const LayerRange& range : ranges) {
            EXPECT_EQ(range.begin, next);
            EXPECT_GE(range.end, next);
            next = range.end;
          }
          EXPECT_EQ(next, layers);
        }
      }
    }
  }
}

TEST(Stages, WhatDoesNotWorkIsRefusedByName) {
  expect_refused({.pipeline_model_parallel_size = 3},
                 "[config] actor_rollout_ref.actor.megatron.pipeline_model_parallel_size: wanted "
                 "layers that divide: 8 of 8 "
                 "layers are left for 3 equal stages");
  expect_refused({.pipeline_model_parallel_size = 0}, "pipeline_model_parallel_size: wanted >= 1");
  expect_refused(
      with(2, [](StageSplit& s) { s.virtual_pipeline_model_parallel_size = 3; }),
      "[config] actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size: "
      "wanted a divisor of the layers of each stage, counted as the other keys say (4), got 3");
  expect_refused(with(2, [](StageSplit& s) { s.num_layers_per_virtual_pipeline_stage = 3; }),
                 "num_layers_per_virtual_pipeline_stage: wanted a divisor of the layers of a stage "
                 "(4), got 3");
  expect_refused(with(1, [](StageSplit& s) { s.virtual_pipeline_model_parallel_size = 2; }),
                 "virtual_pipeline_model_parallel_size: wanted "
                 "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size above 1 with it, "
                 "got 1");
  expect_refused(with(1, [](StageSplit& s) { s.num_layers_in_first_pipeline_stage = 2; }),
                 "[config] actor_rollout_ref.actor.megatron.override_transformer_config."
                 "num_layers_in_first_pipeline_stage: wanted "
                 "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size above 1");
  expect_refused(with(2,
                      [](StageSplit& s) {
                        s.num_layers_in_first_pipeline_stage = 2;
                        s.account_for_loss_in_pipeline_split = true;
                      }),
                 "account_for_loss_in_pipeline_split: wanted null or false with "
                 "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_"
                 "pipeline_stage, got both");
  expect_refused(with(2,
                      [](StageSplit& s) {
                        s.num_layers_per_virtual_pipeline_stage = 2;
                        s.virtual_pipeline_model_parallel_size = 2;
                      }),
                 "virtual_pipeline_model_parallel_size: wanted null or false with "
                 "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_per_"
                 "virtual_pipeline_stage");
  expect_refused(with(3, [](StageSplit& s) { s.num_layers_in_last_pipeline_stage = 3; }),
                 "num_layers_in_last_pipeline_stage: wanted layers that divide: 5 of 8 layers are "
                 "left for 2 equal stages");
  expect_refused(with(2, [](StageSplit& s) { s.num_layers_in_last_pipeline_stage = 9; }),
                 "num_layers_in_last_pipeline_stage: wanted layers that divide");
}

}  // namespace
}  // namespace banyan::parallel
