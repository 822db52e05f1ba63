#include "banyan/train/passes.h"

#include "banyan/train/sharing_observer.h"

namespace banyan::train {
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
                        const Layout& layout) {
  const std::vector<int64_t> which = valid_of(batch);
  const int64_t size = batch.size();
  const std::vector<Sample> samples = samples_of(batch, which);
  const trie::Plan plan = plan_of(samples, options, layout);
  if (which.empty()) {
    if (walks_together(model)) score_samples(model, plan, head, nullptr, layout.context);
    return {TokenLists(size), {}, {}};
  }
  PassObserver* watching = prepare_pass(layout.observer,
                                        {.name = name,
                                         .batch_keys = {"input_ids", "position_ids"},
                                         .share = options.build.share,
                                         .native = is_native(model.options())},
                                        samples,
                                        plan);
  SampleScores scores = score_samples(model, plan, head, watching, layout.context);
  finish_pass(layout.observer);
  return {.value = spread(which, size, std::move(scores.value)),
          .entropy = spread(which, size, std::move(scores.entropy)),
          .sum_squares = spread(which, size, std::move(scores.sum_squares))};
}

}  // namespace banyan::train
