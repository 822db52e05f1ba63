// KL-Cov (Cui et al., "The entropy mechanism of reinforcement learning", 2025): the tokens whose
// advantage and log-probability move together most are held back,
//   L = -A rho, plus ppo_kl_coef |x| on the max(1, int(kl_cov_ratio N)) masked tokens of largest
//   cov = (A - mean A)(l - mean l)
// Means, quota and ranking cover the whole mini-batch (T17); ties go by sequence, then position.
// Reports ppo_kl_abs = mean |x| beside the ppo_kl of every loss (T36).
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>

#include <algorithm>
#include <tuple>

#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/tokens.h"

namespace banyan::algo::detail {
namespace {

std::vector<int64_t> largest(const LossTokens& tokens, size_t quota) {
  const std::vector<double> cov = covariance(tokens);
  const at::Tensor mask = tokens.mask.contiguous();
  const double* m = mask.const_data_ptr<double>();
  std::vector<std::tuple<double, int64_t, int64_t>> ranked;  // (-cov, sequence, token)
  for (size_t s = 0; s + 1 < tokens.offsets.size(); ++s) {
    const int64_t sequence = tokens.sequence.empty() ? static_cast<int64_t>(s) : tokens.sequence[s];
    for (int64_t u = tokens.offsets[s]; u < tokens.offsets[s + 1]; ++u) {
      if (m[u] != 0.0) ranked.emplace_back(-cov[u], sequence, u);
    }
  }
  std::sort(ranked.begin(), ranked.end());
  std::vector<int64_t> chosen;
  for (size_t k = 0; k < std::min(quota, ranked.size()); ++k) {
    chosen.push_back(std::get<2>(ranked[k]));
  }
  return chosen;
}

}  // namespace

PolicyLossResult kl_cov_loss(const LossTokens& tokens,
                             const at::Tensor& log_prob,
                             const LossOptions& options) {
  const at::Tensor x = log_prob - tokens.old_log_prob;
  const at::Tensor distance = at::abs(x);
  const double num_tokens = tokens.mask.sum().item<double>();
  const auto quota = std::max<size_t>(1, static_cast<size_t>(options.kl_cov_ratio * num_tokens));
  const at::Tensor held = indicator(largest(tokens, quota), log_prob.numel());

  PolicyLossResult result;
  result.loss = -tokens.advantage * safe_exp(x) + distance * held * options.ppo_kl_coef;
  result.metrics["ppo_kl_abs"] =
      mean_of((distance.detach() * tokens.mask).sum().item<double>(), num_tokens);
  return result;
}

}  // namespace banyan::algo::detail
