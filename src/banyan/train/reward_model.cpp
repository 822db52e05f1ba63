#include "banyan/train/reward_model.h"

#include "banyan/core/error.h"
#include "banyan/train/walk.h"

namespace banyan::train {
namespace {

constexpr const char* kPathKey = "reward.reward_model.model_path";

// The number is read at the last token, one row later than a token's own value, so a token behind
// it stands in for the one that would be predicted.
Sample with_end(std::vector<int32_t> tokens, int64_t uid) {
  Sample sample;
  sample.uid = uid;
  sample.scored.assign(tokens.size(), 0);
  sample.tokens = std::move(tokens);
  sample.tokens.push_back(0);
  sample.scored.push_back(1);
  return sample;
}

}  // namespace

RewardModel::RewardModel(const Config& config) : config_(config) {
  BANYAN_CHECK(config.reward_model.model_path,
               "[config] ",
               kPathKey,
               ": wanted a directory with reward.reward_model.enable=true, got null");
  std::vector<std::string> notes;
  models::LoadOptions options{
      banyan::compute_options(config.rollout.dtype, config.trainer.device, config.kernels),
      /*with_backward=*/false};
  options.head = models::HeadKind::kValue;
  options.notes = &notes;
  model_ = models::load_model(*config.reward_model.model_path, options);
  BANYAN_CHECK(notes.empty(),
               "[config] ",
               kPathKey,
               ": wanted a sequence classifier with one label (score.weight), got ",
               *config.reward_model.model_path,
               " without one");
}

void RewardModel::score(bool validation, Host& host, std::vector<Trajectory>& trajectories) {
  const std::vector<std::vector<int32_t>> tokens =
      host.reward_model_tokens(trajectories, validation);
  BANYAN_CHECK(tokens.size() == trajectories.size(),
               "[reward_model] wanted the tokens of ",
               trajectories.size(),
               " samples, got ",
               tokens.size());
  std::vector<Sample> samples;
  std::vector<size_t> which;
  for (size_t i = 0; i < trajectories.size(); ++i) {
    if (trajectories[i].response.empty()) continue;
    for (const int32_t token : tokens[i]) {
      BANYAN_CHECK(token >= 0 && token < model_->shape().vocab,
                   "[reward_model] tokens: wanted ids below ",
                   model_->shape().vocab,
                   ", got ",
                   token);
    }
    samples.push_back(with_end(tokens[i], static_cast<int64_t>(i)));
    which.push_back(i);
  }
  if (samples.empty()) return;
  const Layout layout{config_.sharing.mode != "off", {}};
  const trie::PlanOptions options =
      plan_options(config_.sharing, layout, block_limits(config_.actor), /*for_backward=*/false);
  const SampleScores scores = score_samples(*model_, trie::plan(samples, options), {});
  for (size_t k = 0; k < which.size(); ++k) {
    trajectories[which[k]].reward_model_score = scores.value[k].item<double>();
  }
}

}  // namespace banyan::train
