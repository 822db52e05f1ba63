// Which layers each stage of a pipeline has (specification parallel 5). A stage is a rank of the
// pipeline; its layers lie in one or more chunks. All chunks of all stages, in the order in which a
// token passes them, are the links of the pipeline: link = chunk * stages + stage, so that with
// several chunks a stage (interleaved, Megatron's "virtual" stages; Narayanan et al., "Efficient
// large-scale language model training on GPU clusters", 2021) the layers of a stage are not
// neighbours. Torch-free.
//
//   default                 every stage has layers / stages
//   account_for_embedding   the embedding counts as a layer of the first stage,
//   account_for_loss        the head as one of the last: these have one layer less than the others
//   num_layers_in_first,    the layers of the first and the last stage, over all their chunks; the
//   num_layers_in_last      others share the rest equally
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace banyan::parallel {

// Layers [begin, end).
struct LayerRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end - begin; }
  friend bool operator==(const LayerRange&, const LayerRange&) = default;
};

// The keys; each member has the name of its own.
struct StageSplit {
  int64_t pipeline_model_parallel_size = 1;
  std::optional<int64_t> virtual_pipeline_model_parallel_size = {};  // chunks of a stage
  std::optional<int64_t> num_layers_per_virtual_pipeline_stage = {};
  std::optional<int64_t> num_layers_in_first_pipeline_stage = {};
  std::optional<int64_t> num_layers_in_last_pipeline_stage = {};
  bool account_for_embedding_in_pipeline_split = false;
  bool account_for_loss_in_pipeline_split = false;
  friend bool operator==(const StageSplit&, const StageSplit&) = default;
};

// What can be said without a model. Throws [config] naming the key of a size below 1, of keys
// that exclude each other, and of one that is set without stages.
void check_split(const StageSplit& split);

// The layers of every link, in their order; some may have none. Throws as check_split, and where
// the layers do not divide.
std::vector<LayerRange> split_layers(int64_t num_layers, const StageSplit& split);

}  // namespace banyan::parallel
