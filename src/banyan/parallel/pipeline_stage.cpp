#include "banyan/parallel/pipeline_stage.h"

#include "banyan/core/error.h"

namespace banyan::parallel {

PipelineStage::PipelineStage(Collectives& ranks,
                             Collectives& embedding,
                             int64_t num_layers,
                             const StageSplit& split)
    : ranks_(&ranks), embedding_(&embedding) {
  BANYAN_ASSERT(split.pipeline_model_parallel_size == ranks.size(),
                "a split into ",
                split.pipeline_model_parallel_size,
                " stages over ",
                ranks.size());
  const std::vector<LayerRange> links = split_layers(num_layers, split);
  for (size_t i = ranks.rank(); i < links.size(); i += ranks.size()) chunks_.push_back(links[i]);
}

int64_t PipelineStage::num_in_flight() const {
  const int64_t behind = ranks_->size() - 1 - ranks_->rank();
  if (num_chunks() == 1) return behind + 1;
  const int64_t longest_group = 2 * ranks_->size() - 1;  // the first one has what does not divide
  return 2 * behind + (num_chunks() - 1) * longest_group + 1;
}

void PipelineStage::share_embedding(ParamTable& table, const std::string& name) const {
  if (!is_first_rank() && !is_last_rank()) return;
  table.at(name).is_copy = table.at(name).is_copy || !is_first_rank();
  table.on_finish_grads([this, &table, name] { embedding_->all_reduce_sum(table.at(name).grad); });
}

}  // namespace banyan::parallel
