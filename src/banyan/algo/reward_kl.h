// Token rewards: the score on the last masked token (T22), minus beta times the KL between the old
// policy and the reference on every token (algorithms spec section 5), and the controller of beta.
// Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/algo/advantage.h"

namespace banyan::algo {

// [S][n_i]: 0 but for the score on the last token.
PerToken token_rewards(const std::vector<double>& score, const std::vector<int64_t>& num_tokens);

struct RewardKl {
  double kl = 0.0;             // mean over sequences of the mean over their tokens
  double num_sequences = 0.0;  // valid ones with tokens (T18)
};

// Subtracts beta * kl(old, ref) from the token rewards of valid rows. `kl_penalty` is an estimator
// of section 5; of a "+" form only the value counts. Throws [algorithm.kl_penalty] for another
// word.
RewardKl subtract_kl(const PerToken& old_log_prob,
                     const PerToken& ref_log_prob,
                     const std::vector<uint8_t>& valid,
                     const std::string& kl_penalty,
                     double beta,
                     PerToken& token_reward);
void check_kl_penalty(const std::string& kl_penalty);

// algorithm.kl_ctrl.{type, kl_coef, target_kl, horizon}. adaptive (Ziegler et al., 2019):
//   beta <- beta * (1 + clip(KL / target_kl - 1, -0.2, 0.2) * S / horizon)
// after each step; the step itself uses the old beta. fixed: beta = kl_coef.
class KlController {
 public:
  // Throws [algorithm.kl_ctrl.*] for a value out of range.
  KlController(const std::string& type, double kl_coef, double target_kl, double horizon);
  double coef() const { return coef_; }
  void set_coef(double coef) { coef_ = coef; }  // from a checkpoint
  void update(const RewardKl& measured);

 private:
  bool adaptive_;
  double coef_, target_, horizon_;
};

}  // namespace banyan::algo
