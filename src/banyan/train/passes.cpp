#include "banyan/train/passes.h"

namespace banyan::train {
namespace {

// Per valid trajectory -> per trajectory.
TokenLists spread(const std::vector<int64_t>& which, size_t size, std::vector<at::Tensor> values) {
  if (values.empty()) return {};
  TokenLists out(size);
  for (size_t k = 0; k < which.size(); ++k) out[which[k]] = std::move(values[k]);
  return out;
}

}  // namespace

std::vector<int64_t> valid_of(const Batch& batch) {
  std::vector<int64_t> which;
  for (int64_t i = 0; i < batch.size(); ++i) {
    if (batch.valid(i)) which.push_back(i);
  }
  return which;
}

BatchScores score_batch(const Batch& batch,
                        models::CausalLM& model,
                        const trie::PlanOptions& options,
                        const HeadSpec& head) {
  const std::vector<int64_t> which = valid_of(batch);
  const size_t size = batch.trajectories.size();
  if (which.empty()) return {TokenLists(size), {}, {}};
  SampleScores scores = score_samples(model, trie::plan(samples_of(batch, which), options), head);
  return {.value = spread(which, size, std::move(scores.value)),
          .entropy = spread(which, size, std::move(scores.entropy)),
          .sum_squares = spread(which, size, std::move(scores.sum_squares))};
}

}  // namespace banyan::train
