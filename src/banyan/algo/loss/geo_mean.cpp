// GMPO (Zhao et al., "Geometric-mean policy optimization", 2025): the geometric mean of one-sided
// clipped token ratios weighs the mean advantage of the sequence,
//   y = min(x, clamp(x, -eL, eH)) where A > 0, max(x, clamp(x, -eL, eH)) where A < 0, 0 where A = 0
//   L_i = -(mean of A) exp(mean of y) w_i, w_i = geometric mean of the correction weights
// over the masked tokens of sequence i. The sum over sequences divided by B is part of the
// algorithm (T11; verl divides by the rows of a micro-batch): every token carries L_i,
// seq-mean-token-mean is forced. y is clamped to +-20 as an exponent (T30). A token counts as
// clipped where y differs from x.
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/tokens.h"

namespace banyan::algo::detail {

PolicyLossResult geo_mean_loss(const LossTokens& tokens,
                               const at::Tensor& log_prob,
                               const LossOptions& options) {
  const at::Tensor& advantage = tokens.advantage;
  const at::Tensor x = log_prob - tokens.old_log_prob;
  const at::Tensor bounded = at::clamp(x, -options.clip_ratio_low, options.clip_ratio_high);
  const at::Tensor positive = advantage > 0;
  const at::Tensor negative = advantage < 0;
  const at::Tensor y = at::where(positive,
                                 at::minimum(x, bounded),
                                 at::where(negative, at::maximum(x, bounded), at::zeros_like(x)));

  PolicyLossResult result;
  result.loss = -sequence_mean(advantage, tokens) * safe_exp(sequence_mean(y, tokens));
  if (tokens.weight.defined() && !options.bypass_mode) {
    const at::Tensor weight = at::where(tokens.mask != 0, tokens.weight, at::ones_like(x.detach()));
    result.loss = result.loss * at::exp(sequence_mean(at::log(weight), tokens));
  }
  const at::Tensor clamped = y.detach() != x.detach();
  result.clipped = (clamped & positive).to(at::kDouble);
  result.clipped_lower = (clamped & negative).to(at::kDouble);
  return result;
}

}  // namespace banyan::algo::detail
