// Rewards to advantages and returns (algorithms spec section 6, with banyan's choices T19-T28).
// Numbers are fp64; everything per trajectory covers its masked response tokens only (n_i of them):
// positions with mask 0 pass values through unchanged, which equals leaving them out. Torch-free.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "banyan/core/registry.h"

namespace banyan::algo {

using PerToken = std::vector<std::vector<double>>;  // [S][n_i]

// Fields that an estimator does not need (see the traits below) may stay empty.
struct AdvantageInput {
  std::vector<int64_t> group;  // [S] group (prompt) of each row
  std::vector<uint8_t> valid;  // [S] 0 = takes no part in any statistic and gets 0 (failed scorer)
  std::vector<double> score;   // [S] the scorer's number, before any KL
  PerToken token_reward;       // [S][n_i] the score on the last token, KL in reward subtracted
  // [S] rows with one number are outputs of one trajectory; its last row stands for it in group
  // statistics and all its rows share the advantage (T23). Empty: each row is a trajectory.
  std::vector<int64_t> trajectory;
  PerToken value;                              // [S][n_i] the critic's, before the step
  PerToken old_log_prob;                       // [S][n_i]
  PerToken sum_squares;                        // [S][n_i] sum over the vocabulary of p^2
  PerToken weight;                             // [S][n_i] rollout correction; empty = 1
  std::vector<std::vector<int64_t>> position;  // [S][n_i] response position of each masked token;
                                               // empty: 0, 1, 2, ...
  std::vector<double> greedy_score;            // [S] score of the greedy response to the prompt
  std::map<std::string, std::vector<double>> components;  // reward component -> [S]
};

struct AdvantageOptions {               // key
  bool norm_adv_by_std_in_grpo = true;  // algorithm.norm_adv_by_std_in_grpo; false: Dr.GRPO
  double gamma = 1.0;                   // algorithm.gamma
  double lam = 1.0;                     // algorithm.lam
  std::vector<std::string> gdpo_reward_keys = {};  // algorithm.gdpo_reward_keys
  std::vector<double> gdpo_reward_weights = {};    // algorithm.gdpo_reward_weights; empty: all 1
};

struct AdvantageResult {
  PerToken advantage;  // [S][n_i]; zeros for rows that are not valid
  PerToken returns;    // [S][n_i]
};

using AdvantageFunction =
    std::function<AdvantageResult(const AdvantageInput&, const AdvantageOptions&)>;

// An estimator and what it wants from the trainer.
struct Advantage {
  AdvantageFunction function;
  bool needs_value = false;        // a critic: `value` (gae)
  bool needs_greedy = false;       // `greedy_score` (remax)
  bool needs_sum_squares = false;  // `old_log_prob` and `sum_squares` (token baselines)
  bool needs_components = false;   // `components` (gdpo)
  bool is_group_relative =
      false;             // compares trajectories of one group: rollout.n = 1 gives nothing
  bool is_user = false;  // a Python function "file.py:name"
};

const Registry<Advantage>& advantages();  // "gae", "grpo", ...

// The estimator that algorithm.adv_estimator names, a user's function included. Throws
// [algorithm.adv_estimator] for an unknown name.
Advantage advantage(const std::string& name);

// Throws for what the estimator cannot work with: [rollout.n] for a group of one (T20),
// [algorithm.*] for a value out of range. Call before a model loads.
void check_advantage_options(const std::string& name,
                             const AdvantageOptions& options,
                             int64_t samples_per_prompt);

// Runs the estimator; checks that what it needs is there (a bug of ours) and that what it returns
// has the right shape and is finite.
AdvantageResult compute_advantages(const std::string& name,
                                   const AdvantageInput& input,
                                   const AdvantageOptions& options);

}  // namespace banyan::algo
