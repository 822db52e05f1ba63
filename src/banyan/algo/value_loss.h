// The critic's loss (algorithms spec section 10), PPO2's clipped regression:
//   vf = 0.5 agg( max( (V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2 ) )
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "banyan/algo/advantage.h"
#include "banyan/algo/loss.h"

namespace banyan::algo {

// Per logical token [U], fp32 or fp64, samples one after the other.
struct ValueTokens {
  at::Tensor value;      // of the critic as it is now
  at::Tensor old_value;  // before the step
  at::Tensor returns;
  at::Tensor mask;
  std::vector<int64_t> offsets;  // [S + 1]
};

struct ValueLossOptions {
  double cliprange_value = 0.5;              // critic.cliprange_value
  std::string loss_agg_mode = "token-mean";  // critic.loss_agg_mode
};

// Exact sums over the tokens; divide by N once all blocks are in.
struct ValueLossResult {
  double loss = 0.0;            // these tokens' share
  double clipped_tokens = 0.0;  // clipped branch larger
  double value_sum = 0.0;       // of critic/vpred_mean
  at::Tensor grad_value;        // [U], type and device of `value`
};

ValueLossResult value_loss(const ValueTokens& tokens,
                           const LossScale& scale,
                           const ValueLossOptions& options);

void check_value_loss_options(const ValueLossOptions& options);

// critic/vf_explained_var = 1 - var(R - V) / (var(R) + 1e-5) over all tokens of the batch (sample
// variances). 0 with fewer than two tokens.
double explained_variance(const PerToken& value, const PerToken& returns);

}  // namespace banyan::algo
