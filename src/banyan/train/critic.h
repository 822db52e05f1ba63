// The critic of PPO: a model with a value head and an optimizer of its own. Values come from one
// trie of the whole batch, updates from one trie per mini-batch; the value of a token is read at
// the row that predicts it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/models/causal_lm.h"
#include "banyan/optim/adamw.h"
#include "banyan/optim/schedule.h"
#include "banyan/parallel/fsdp.h"
#include "banyan/parallel/groups.h"
#include "banyan/train/batch.h"
#include "banyan/train/layout.h"

namespace banyan::train {

// critic.enable, or whether the advantage estimator needs values.
bool wants_critic(const Config& config);

struct CriticUpdate {
  double loss = 0.0;            // critic/vf_loss of the mini-batch
  double clipped_tokens = 0.0;  // exact sums over its tokens
  double value_sum = 0.0;
  double num_tokens = 0.0;  // N
  double grad_norm = 0.0;   // before clipping
  bool skipped = false;     // not finite: weights unchanged
  std::vector<std::string> warnings;
};

class Critic {
 public:
  // Loads the model; what is said about it is added to `notes`. `groups` as train(). Throws
  // [config] for a bad value.
  Critic(const Config& config,
         int64_t total_steps,
         std::vector<std::string>& notes,
         parallel::Groups& groups);

  // Values of the batch's tokens, without gradients.
  TokenLists values(const Batch& batch, const Layout& layout);
  // All epochs of mini-batches, towards batch.returns.
  std::vector<CriticUpdate> update(const Batch& batch, const Layout& layout, int64_t step);

  double learning_rate(int64_t step) const;
  models::CausalLM& model() { return *model_; }
  optim::AdamW& optimizer() { return *optimizer_; }
  const std::string& config_from() const { return path_; }

 private:
  const Config& config_;
  std::string path_;
  optim::ScheduleOptions schedule_;
  std::unique_ptr<models::CausalLM> model_;
  std::unique_ptr<parallel::Fsdp> fsdp_;  // null: the weights are whole
  std::unique_ptr<optim::AdamW> optimizer_;
};

// The critic's options, checked; call before a model loads.
void check_critic_config(const Config& config);

// Gradients of the critic's loss on one mini-batch: parity tests and Critic itself.
CriticUpdate accumulate_value_gradients(const Config& config,
                                        const Batch& batch,
                                        const std::vector<int64_t>& mini_batch,
                                        const Layout& layout,
                                        models::CausalLM& model);

}  // namespace banyan::train
