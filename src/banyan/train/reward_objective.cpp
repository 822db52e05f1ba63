// A Bradley-Terry reward model: the value head's number at the last token of a sample is its
// reward. The number of a scored token is read at the row that predicts it, so each sample gets one
// more token, and that one alone is scored.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include "banyan/algo/preference.h"
#include "banyan/core/error.h"
#include "banyan/train/detail/objectives.h"

namespace banyan::train::detail {
namespace {

constexpr int32_t kClosingToken = 0;  // any token of the vocabulary: nothing attends to it

std::vector<Sample> closed(std::vector<Example> batch) {
  std::vector<Sample> samples = flatten(std::move(batch));
  for (Sample& sample : samples) {
    sample.tokens.push_back(kClosingToken);
    sample.scored.assign(sample.tokens.size(), 0);
    sample.scored.back() = 1;
  }
  return samples;
}

class RewardModel final : public Objective {
 public:
  RewardModel(const FinetuneConfig& config, const Pass& pass) : pass_(pass) {
    options_.center_rewards_coefficient = config.preference->center_rewards_coefficient;
  }

  double weight(const std::vector<Example>& batch) const override {
    return static_cast<double>(batch.size());
  }

  BatchResult train(const std::vector<int64_t>& rows,
                    std::vector<Example> examples,
                    double weight) override {
    const std::vector<Sample> samples = closed(std::move(examples));
    BatchResult result = train_pass(pass_, samples, /*pairs=*/true, loss(rows.size(), weight));
    result.weight = weight;
    return result;
  }

  BatchResult score(const std::vector<int64_t>& rows,
                    std::vector<Example> examples,
                    double weight) override {
    BatchResult result = score_pass(pass_, closed(std::move(examples)), loss(rows.size(), weight));
    result.weight = weight;
    return result;
  }

 private:
  // One number per sample: 2p chosen, 2p + 1 rejected, of the pairs here, of `num_pairs` in all.
  Evaluate loss(size_t num_here, double num_pairs) const {
    return [this, num_here, num_pairs](const std::vector<int32_t>& which,
                                       const TokenOutputs& outputs) {
      std::vector<int64_t> place(2 * num_here, -1);
      for (size_t k = 0; k < which.size(); ++k) place[which[k]] = static_cast<int64_t>(k);
      std::vector<int64_t> chosen, rejected;
      for (size_t p = 0; p < place.size(); p += 2) {
        if (place[p] < 0) continue;
        BANYAN_ASSERT(place[p + 1] >= 0, "reward model: pair ", p / 2, " is not whole");
        chosen.push_back(place[p]);
        rejected.push_back(place[p + 1]);
      }
      const at::Tensor first = at::tensor(chosen), second = at::tensor(rejected);
      algo::RewardModelResult result =
          algo::reward_model_loss(outputs.value.index_select(0, first),
                                  outputs.value.index_select(0, second),
                                  /*margin=*/at::Tensor(),
                                  num_pairs,
                                  options_);
      Evaluated out;
      out.loss = result.loss;
      out.metrics = std::move(result.metrics);
      out.gradients.value = at::empty_like(outputs.value);
      out.gradients.value.index_copy_(0, first, result.grad_chosen.to(outputs.value));
      out.gradients.value.index_copy_(0, second, result.grad_rejected.to(outputs.value));
      return out;
    };
  }

  algo::RewardModelOptions options_;
  Pass pass_;
};

}  // namespace

std::unique_ptr<Objective> make_reward_model(const FinetuneConfig& config, const Pass& pass) {
  return std::make_unique<RewardModel>(config, pass);
}

}  // namespace banyan::train::detail
