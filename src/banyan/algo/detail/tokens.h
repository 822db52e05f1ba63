// Helpers of the policy losses on 1-D tensors of masked tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "banyan/algo/loss.h"

namespace banyan::algo::detail {

// [U] the sum (mean) over the masked tokens of each token's sequence, on every token of it;
// differentiable. The mean of a sequence without masked tokens is 0.
at::Tensor sequence_sum(const at::Tensor& values, const LossTokens& tokens);
at::Tensor sequence_mean(const at::Tensor& values, const LossTokens& tokens);

// -A min-max clipped surrogate without dual clip: max(-A rho, -A clip(rho, 1 - eL, 1 + eH)).
struct ClippedSurrogate {
  at::Tensor loss;
  at::Tensor clipped;  // bool: the clipped branch is larger
};
ClippedSurrogate clipped_surrogate(const at::Tensor& advantage,
                                   const at::Tensor& ratio,
                                   const LossOptions& options);

// (A - mean A)(l - mean l), means over masked tokens; detached; one entry per token.
std::vector<double> covariance(const LossTokens& tokens);

// 0/1 tensor [U] fp64 with ones at `chosen`.
at::Tensor indicator(const std::vector<int64_t>& chosen, int64_t size);

}  // namespace banyan::algo::detail
