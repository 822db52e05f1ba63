// Supervised loss: -sum_u w_u l_u / N, N the number (or weight) of scored tokens of the mini-batch
// over all ranks (algorithms spec section 11; no hidden factor, T13).
#pragma once

#include <ATen/core/Tensor.h>

namespace banyan::algo {

struct SftResult {
  double loss = 0.0;  // these tokens' share
  at::Tensor grad;    // [U], type and device of log_prob
};

// log_prob [U]; weight [U] >= 0, undefined = 1 (a loss mask, or per-token weights).
SftResult sft_loss(const at::Tensor& log_prob, const at::Tensor& weight, double num_tokens);

}  // namespace banyan::algo
