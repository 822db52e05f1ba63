// What one rank of a pipeline has of a model: chunks of its layers, the embedding on the first
// stage, the last norm and the head on the last (stages.h). A tied head is a copy of the embedding:
// first and last stage add their gradients of it, and step it alike.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/param.h"
#include "banyan/parallel/collectives.h"
#include "banyan/parallel/pipeline_schedule.h"
#include "banyan/parallel/stages.h"

namespace banyan::parallel {

class PipelineStage {
 public:
  // `ranks` are the stages' ranks in their order, `embedding` first and last of them; borrowed.
  // Throws [parallel] as split_layers.
  PipelineStage(Collectives& ranks,
                Collectives& embedding,
                int64_t num_layers,
                const StageSplit& split);

  Collectives& ranks() const { return *ranks_; }
  int64_t num_chunks() const { return static_cast<int64_t>(chunks_.size()); }
  // Those of the model.
  const LayerRange& layers(int64_t chunk) const { return chunks_[chunk]; }
  bool is_first_rank() const { return ranks_->is_first(); }
  bool is_last_rank() const { return ranks_->rank() == ranks_->size() - 1; }
  // The chunk that tokens enter, and the one whose output the head reads.
  bool is_first(int64_t chunk) const { return is_first_rank() && chunk == 0; }
  bool is_last(int64_t chunk) const { return is_last_rank() && chunk == num_chunks() - 1; }
  // Blocks whose activations this rank has at one time, at most, in layers of a chunk each: of
  // blocks without shared parts.
  int64_t num_in_flight() const;
  // What the stages run for these entries; good until the next call. By the thread that trains.
  const std::vector<PipelineSteps>& schedule(const std::vector<trie::Entry>& entries) const {
    return schedules_.of(entries, ranks_->size(), num_chunks());
  }

  // On first and last stage of a model with a tied head: `name` is both's, counted by the first in
  // the norm, and finish_grads() adds the gradients.
  void share_embedding(ParamTable& table, const std::string& name) const;

 private:
  Collectives* ranks_;
  Collectives* embedding_;
  std::vector<LayerRange> chunks_;
  mutable PipelineSchedules schedules_;  // what is known already
};

}  // namespace banyan::parallel
