#include "banyan/train/passes.h"

#include "banyan/train/sharing_observer.h"

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
                        const HeadSpec& head,
                        const std::string& name,
                        SharingObserver* observer) {
  const std::vector<int64_t> which = valid_of(batch);
  const size_t size = batch.trajectories.size();
  if (which.empty()) return {TokenLists(size), {}, {}};
  const std::vector<Sample> samples = samples_of(batch, which);
  const trie::Plan plan = trie::plan(samples, options);
  PassObserver* watching = prepare_pass(observer,
                                        {.name = name,
                                         .batch_keys = {"input_ids", "position_ids"},
                                         .share = options.build.share,
                                         .native = is_native(model.options())},
                                        samples,
                                        plan);
  SampleScores scores = score_samples(model, plan, head, watching);
  finish_pass(observer);
  return {.value = spread(which, size, std::move(scores.value)),
          .entropy = spread(which, size, std::move(scores.entropy)),
          .sum_squares = spread(which, size, std::move(scores.sum_squares))};
}

}  // namespace banyan::train
