#include "banyan/algo/detail/tokens.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_add.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

namespace banyan::algo::detail {
namespace {

// [U] the index of each token's sequence.
at::Tensor sequence_index(const LossTokens& tokens) {
  at::Tensor index = at::empty({tokens.offsets.back()}, at::kLong);
  int64_t* out = index.mutable_data_ptr<int64_t>();
  for (size_t s = 0; s + 1 < tokens.offsets.size(); ++s) {
    for (int64_t u = tokens.offsets[s]; u < tokens.offsets[s + 1]; ++u) {
      out[u] = static_cast<int64_t>(s);
    }
  }
  return index;
}

// [S] sums over the masked tokens.
at::Tensor sums(const at::Tensor& values, const LossTokens& tokens, const at::Tensor& index) {
  const auto size = static_cast<int64_t>(tokens.offsets.size()) - 1;
  return at::zeros({size}, values.options()).index_add(0, index, values * tokens.mask);
}

}  // namespace

at::Tensor sequence_sum(const at::Tensor& values, const LossTokens& tokens) {
  const at::Tensor index = sequence_index(tokens);
  return sums(values, tokens, index).index_select(0, index);
}

at::Tensor sequence_mean(const at::Tensor& values, const LossTokens& tokens) {
  const at::Tensor index = sequence_index(tokens);
  const at::Tensor count = sums(at::ones_like(tokens.mask), tokens, index);
  return (sums(values, tokens, index) / at::clamp_min(count, 1.0)).index_select(0, index);
}

ClippedSurrogate clipped_surrogate(const at::Tensor& advantage,
                                   const at::Tensor& ratio,
                                   const LossOptions& options) {
  const at::Tensor plain = -advantage * ratio;
  const at::Tensor bounded =
      -advantage * at::clamp(ratio, 1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high);
  return {at::maximum(plain, bounded), bounded > plain};
}

std::vector<double> covariance(const LossTokens& tokens) {
  const at::Tensor log_prob = tokens.log_prob.detach().contiguous();
  const at::Tensor advantage = tokens.advantage.contiguous();
  const at::Tensor mask = tokens.mask.contiguous();
  const double* l = log_prob.const_data_ptr<double>();
  const double* a = advantage.const_data_ptr<double>();
  const double* m = mask.const_data_ptr<double>();
  double count = 0.0, mean_l = 0.0, mean_a = 0.0;
  for (int64_t u = 0; u < log_prob.numel(); ++u) {
    count += m[u];
    mean_l += l[u] * m[u];
    mean_a += a[u] * m[u];
  }
  if (count > 0.0) {
    mean_l /= count;
    mean_a /= count;
  }
  std::vector<double> out(log_prob.numel());
  for (size_t u = 0; u < out.size(); ++u) out[u] = (a[u] - mean_a) * (l[u] - mean_l);
  return out;
}

at::Tensor indicator(const std::vector<int64_t>& chosen, int64_t size) {
  at::Tensor out = at::zeros({size}, at::kDouble);
  double* flags = out.mutable_data_ptr<double>();
  for (const int64_t u : chosen) flags[u] = 1.0;
  return out;
}

}  // namespace banyan::algo::detail
