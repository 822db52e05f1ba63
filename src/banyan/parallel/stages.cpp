#include "banyan/parallel/stages.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::parallel {
namespace {

constexpr const char* kStages = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size";
constexpr const char* kChunks =
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size";
constexpr const char* kPerStage =
    "actor_rollout_ref.actor.megatron.override_transformer_config."
    "num_layers_per_virtual_pipeline_stage";
constexpr const char* kFirst =
    "actor_rollout_ref.actor.megatron.override_transformer_config."
    "num_layers_in_first_pipeline_stage";
constexpr const char* kLast =
    "actor_rollout_ref.actor.megatron.override_transformer_config."
    "num_layers_in_last_pipeline_stage";
constexpr const char* kEmbedding =
    "actor_rollout_ref.actor.megatron.override_transformer_config."
    "account_for_embedding_in_pipeline_split";
constexpr const char* kLoss =
    "actor_rollout_ref.actor.megatron.override_transformer_config."
    "account_for_loss_in_pipeline_split";

void check_divides(const char* key, int64_t divisor, const char* of, int64_t whole) {
  BANYAN_CHECK(divisor > 0 && whole % divisor == 0,
               "[config] ",
               key,
               ": wanted a divisor of ",
               of,
               " (",
               whole,
               "), got ",
               divisor);
}

void check_positive(const char* key, const std::optional<int64_t>& value) {
  BANYAN_CHECK(!value || *value >= 1, "[config] ", key, ": wanted >= 1, got ", *value);
}

void check_without(const char* key, bool is_set, const char* other, bool other_is_set) {
  BANYAN_CHECK(!is_set || !other_is_set,
               "[config] ",
               key,
               ": wanted null or false with ",
               other,
               ", got both: they exclude each other");
}

// Of a stage with `layers`.
int64_t num_chunks(const StageSplit& split, int64_t layers) {
  if (!split.num_layers_per_virtual_pipeline_stage) {
    return split.virtual_pipeline_model_parallel_size.value_or(1);
  }
  const int64_t per_stage = *split.num_layers_per_virtual_pipeline_stage;
  check_divides(kPerStage, per_stage, "the layers of a stage", layers);
  return layers / per_stage;
}

// Layers of each stage, pseudo-layers included.
std::vector<int64_t> layers_of_stages(int64_t num_layers, const StageSplit& split) {
  const int64_t stages = split.pipeline_model_parallel_size;
  const auto& first = split.num_layers_in_first_pipeline_stage;
  const auto& last = split.num_layers_in_last_pipeline_stage;
  const int64_t rest = num_layers - first.value_or(0) - last.value_or(0);
  const int64_t num_equal = stages - (first ? 1 : 0) - (last ? 1 : 0);
  BANYAN_CHECK(
      rest >= 0 && (num_equal > 0 ? rest % num_equal == 0 : rest == 0),
      "[config] ",
      first || last ? (first ? kFirst : kLast) : kStages,
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
  std::vector<int64_t> layers(stages, num_equal > 0 ? rest / num_equal : 0);
  if (first) layers.front() = *first;
  if (last) layers.back() = *last;
  return layers;
}

}  // namespace

void check_split(const StageSplit& split) {
  const bool has_sizes =
      split.num_layers_in_first_pipeline_stage || split.num_layers_in_last_pipeline_stage;
  const char* sizes = split.num_layers_in_first_pipeline_stage ? kFirst : kLast;
  check_positive(kStages, split.pipeline_model_parallel_size);
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
    BANYAN_CHECK(!is_set, "[config] ", key, ": wanted ", kStages, " above 1 with it, got 1");
  };
  check_alone(kChunks, split.virtual_pipeline_model_parallel_size.value_or(1) > 1);
  check_alone(kPerStage, split.num_layers_per_virtual_pipeline_stage.has_value());
  check_alone(sizes, has_sizes);
}

std::vector<LayerRange> split_layers(int64_t num_layers, const StageSplit& split) {
  check_split(split);
  const int64_t stages = split.pipeline_model_parallel_size;
  if (stages == 1) return {{0, num_layers}};
  const int64_t embedding = split.account_for_embedding_in_pipeline_split ? 1 : 0;
  const int64_t loss = split.account_for_loss_in_pipeline_split ? 1 : 0;
  const std::vector<int64_t> layers = layers_of_stages(num_layers + embedding + loss, split);
  const int64_t chunks = num_chunks(split, layers.front());
  for (const int64_t count : layers) {
    check_divides(
        kChunks, chunks, "the layers of each stage, counted as the other keys say", count);
  }
  std::vector<LayerRange> links;
  int64_t begin = 0;
  for (int64_t link = 0; link < stages * chunks; ++link) {
    int64_t count = layers[link % stages] / chunks;
    if (link == 0) count -= embedding;
    if (link == stages * chunks - 1) count -= loss;
    count = std::max<int64_t>(count, 0);
    links.push_back({begin, begin + count});
    begin += count;
  }
  BANYAN_CHECK(begin == num_layers,
               "[config] ",
               kStages,
               ": wanted at most as many chunks as layers with embedding and loss counted, got ",
               stages * chunks,
               " chunks for ",
               num_layers,
               " layers");
  return links;
}

}  // namespace banyan::parallel
