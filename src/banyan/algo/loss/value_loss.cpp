#include "banyan/algo/value_loss.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo {
namespace {

at::Tensor wide(const at::Tensor& values) {
  return values.detach().to(at::kCPU, at::kDouble).contiguous();
}

double variance(const std::vector<double>& values) {
  if (values.size() < 2) return 0.0;
  const auto size = static_cast<double>(values.size());
  double mean = 0.0, squares = 0.0;
  for (const double value : values) mean += value / size;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return squares / (size - 1.0);
}

}  // namespace

ValueLossResult value_loss(const ValueTokens& tokens,
                           const LossScale& scale,
                           const ValueLossOptions& options) {
  const int64_t size = tokens.value.numel();
  BANYAN_ASSERT(!tokens.offsets.empty() && tokens.offsets.back() == size &&
                    tokens.old_value.numel() == size && tokens.returns.numel() == size &&
                    tokens.mask.numel() == size,
                "value_loss: ",
                size,
                " values, vectors of other lengths");
  LossTokens shape;
  shape.mask = tokens.mask;
  shape.offsets = tokens.offsets;
  const at::Tensor weights = detail::aggregation_weights(shape, options.loss_agg_mode, scale);
  const at::Tensor value = wide(tokens.value), old_value = wide(tokens.old_value);
  const at::Tensor returns = wide(tokens.returns);
  at::Tensor grad = at::empty_like(value);
  const double* v = value.const_data_ptr<double>();
  const double* before = old_value.const_data_ptr<double>();
  const double* target = returns.const_data_ptr<double>();
  const double* w = weights.const_data_ptr<double>();
  double* g = grad.mutable_data_ptr<double>();
  const double range = options.cliprange_value;
  ValueLossResult result;
  for (int64_t u = 0; u < size; ++u) {
    g[u] = 0.0;
    if (w[u] == 0.0) continue;
    const double bounded = std::clamp(v[u], before[u] - range, before[u] + range);
    const double plain = (v[u] - target[u]) * (v[u] - target[u]);
    const double clipped = (bounded - target[u]) * (bounded - target[u]);
    const bool is_clipped = clipped > plain;
    result.loss += 0.5 * w[u] * std::max(plain, clipped);
    result.clipped_tokens += is_clipped ? 1.0 : 0.0;
    result.value_sum += v[u];
    // Where the clipped branch is larger it is flat: the clip is active there.
    g[u] = is_clipped ? 0.0 : w[u] * (v[u] - target[u]);
  }
  result.grad_value = grad.to(tokens.value.options());
  return result;
}

void check_value_loss_options(const ValueLossOptions& options) {
  detail::check_aggregation_mode(options.loss_agg_mode);
  BANYAN_CHECK(std::isfinite(options.cliprange_value) && options.cliprange_value > 0.0,
               "[critic.cliprange_value] wanted a finite number > 0, got ",
               options.cliprange_value);
}

double explained_variance(const PerToken& value, const PerToken& returns) {
  std::vector<double> all, errors;
  for (size_t i = 0; i < returns.size(); ++i) {
    for (size_t t = 0; t < returns[i].size(); ++t) {
      all.push_back(returns[i][t]);
      errors.push_back(returns[i][t] - value[i][t]);
    }
  }
  if (all.size() < 2) return 0.0;
  return 1.0 - variance(errors) / (variance(all) + 1e-5);
}

}  // namespace banyan::algo
