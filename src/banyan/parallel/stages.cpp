#include "banyan/parallel/stages.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::parallel {
namespace {

constexpr const char* kRanks = "pipeline_model_parallel_size";
constexpr const char* kChunks = "virtual_pipeline_model_parallel_size";
constexpr const char* kPerStage = "num_layers_per_virtual_pipeline_stage";
constexpr const char* kFirst = "num_layers_in_first_pipeline_stage";
constexpr const char* kLast = "num_layers_in_last_pipeline_stage";
constexpr const char* kEmbedding = "account_for_embedding_in_pipeline_split";
constexpr const char* kLoss = "account_for_loss_in_pipeline_split";

void check_divides(const char* key, int64_t divisor, const char* of, int64_t whole) {
  BANYAN_CHECK(divisor > 0 && whole % divisor == 0,
               "[parallel] ",
               key,
               ": wanted a divisor of ",
               of,
               " (",
               whole,
               "), got ",
               divisor);
}

void check_positive(const char* key, const std::optional<int64_t>& value) {
  BANYAN_CHECK(!value || *value >= 1, "[parallel] ", key, ": wanted >= 1, got ", *value);
}

void check_without(const char* key, bool is_set, const char* other, bool other_is_set) {
  BANYAN_CHECK(!is_set || !other_is_set,
               "[parallel] ",
               key,
               ": wanted null or false with ",
               other,
               ", got both: they exclude each other");
}

// Of `layers` on a rank.
int64_t num_chunks(const StageSplit& split, int64_t layers) {
  if (!split.num_layers_per_virtual_pipeline_stage) {
    return split.virtual_pipeline_model_parallel_size.value_or(1);
  }
  const int64_t per_stage = *split.num_layers_per_virtual_pipeline_stage;
  check_divides(kPerStage, per_stage, "the layers of a rank", layers);
  return layers / per_stage;
}

// Layers of each rank, pseudo-layers included.
std::vector<int64_t> layers_of_ranks(int64_t num_layers, const StageSplit& split) {
  const int64_t ranks = split.pipeline_model_parallel_size;
  const auto& first = split.num_layers_in_first_pipeline_stage;
  const auto& last = split.num_layers_in_last_pipeline_stage;
  const int64_t rest = num_layers - first.value_or(0) - last.value_or(0);
  const int64_t num_equal = ranks - (first ? 1 : 0) - (last ? 1 : 0);
  BANYAN_CHECK(
      rest >= 0 && (num_equal > 0 ? rest % num_equal == 0 : rest == 0),
      "[parallel] ",
      first || last ? (first ? kFirst : kLast) : kRanks,
      ": wanted layers that divide: ",
      rest,
      " of ",
      num_layers,
      " layers are left for ",
      num_equal,
      " equal stages",
      split.account_for_embedding_in_pipeline_split || split.account_for_loss_in_pipeline_split
          ? " (embedding or loss counted as layers)"
          : "");
  std::vector<int64_t> layers(ranks, num_equal > 0 ? rest / num_equal : 0);
  if (first) layers.front() = *first;
  if (last) layers.back() = *last;
  return layers;
}

}  // namespace

void check_split(const StageSplit& split) {
  const bool has_sizes =
      split.num_layers_in_first_pipeline_stage || split.num_layers_in_last_pipeline_stage;
  const char* sizes = split.num_layers_in_first_pipeline_stage ? kFirst : kLast;
  check_positive(kRanks, split.pipeline_model_parallel_size);
  check_positive(kChunks, split.virtual_pipeline_model_parallel_size);
  check_positive(kPerStage, split.num_layers_per_virtual_pipeline_stage);
  check_positive(kFirst, split.num_layers_in_first_pipeline_stage);
  check_positive(kLast, split.num_layers_in_last_pipeline_stage);
  check_without(kChunks,
                split.virtual_pipeline_model_parallel_size.has_value(),
                kPerStage,
                split.num_layers_per_virtual_pipeline_stage.has_value());
  check_without(
      kPerStage, split.num_layers_per_virtual_pipeline_stage.has_value(), sizes, has_sizes);
  check_without(kEmbedding, split.account_for_embedding_in_pipeline_split, sizes, has_sizes);
  check_without(kLoss, split.account_for_loss_in_pipeline_split, sizes, has_sizes);
  if (split.pipeline_model_parallel_size > 1) return;
  const auto check_alone = [&](const char* key, bool is_set) {
    BANYAN_CHECK(!is_set, "[parallel] ", key, ": wanted ", kRanks, " above 1 with it, got 1");
  };
  check_alone(kChunks, split.virtual_pipeline_model_parallel_size.value_or(1) > 1);
  check_alone(kPerStage, split.num_layers_per_virtual_pipeline_stage.has_value());
  check_alone(sizes, has_sizes);
}

std::vector<LayerRange> split_layers(int64_t num_layers, const StageSplit& split) {
  check_split(split);
  const int64_t ranks = split.pipeline_model_parallel_size;
  if (ranks == 1) return {{0, num_layers}};
  const int64_t embedding = split.account_for_embedding_in_pipeline_split ? 1 : 0;
  const int64_t loss = split.account_for_loss_in_pipeline_split ? 1 : 0;
  const std::vector<int64_t> layers = layers_of_ranks(num_layers + embedding + loss, split);
  const int64_t chunks = num_chunks(split, layers.front());
  for (const int64_t count : layers) {
    check_divides(kChunks, chunks, "the layers of each rank, counted as the other keys say", count);
  }
  std::vector<LayerRange> stages;
  int64_t begin = 0;
  for (int64_t stage = 0; stage < ranks * chunks; ++stage) {
    int64_t count = layers[stage % ranks] / chunks;
    if (stage == 0) count -= embedding;
    if (stage == ranks * chunks - 1) count -= loss;
    count = std::max<int64_t>(count, 0);
    stages.push_back({begin, begin + count});
    begin += count;
  }
  BANYAN_CHECK(begin == num_layers,
               "[parallel] ",
               kRanks,
               ": wanted at most as many stages as layers with embedding and loss counted, got ",
               ranks * chunks,
               " stages for ",
               num_layers,
               " layers");
  return stages;
}

}  // namespace banyan::parallel
