// A reward model as a scorer: a sequence classifier with one label reads prompt and response, all
// samples of a rollout through one trie. Its number is the value of the last token.
#pragma once

#include <memory>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/core/host.h"
#include "banyan/models/causal_lm.h"
#include "banyan/train/layout.h"

namespace banyan::train {

class RewardModel {
 public:
  // Throws FileError for a directory that cannot be loaded, [config] for one without a value head.
  explicit RewardModel(const Config& config);

  // Sets reward_model_score of every trajectory that has a response; the host says which tokens the
  // model reads.
  void score(bool validation, Host& host, std::vector<Trajectory>& trajectories);

 private:
  const Config& config_;
  std::unique_ptr<models::CausalLM> model_;
};

}  // namespace banyan::train
