// agg(z) = sum_u w_u z_u with m the mask, n_i the masked tokens of sequence i, N and B of the whole
// mini-batch:
//   token-mean               w = m / N
//   token-sum                w = m
//   seq-mean-token-sum       w = m / B
//   seq-mean-token-sum-norm  w = m / (B norm)
//   seq-mean-token-mean      w = m / (n_i B)
// n_i is exact (T13); a sequence with n_i = 0 contributes 0; with N or B = 0 nothing counts.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo {
namespace detail {
namespace {

constexpr std::array<const char*, 5> kModes = {"token-mean",
                                               "token-sum",
                                               "seq-mean-token-sum",
                                               "seq-mean-token-sum-norm",
                                               "seq-mean-token-mean"};

double inverse(double value) { return value > 0.0 ? 1.0 / value : 0.0; }

}  // namespace

void check_aggregation_mode(const std::string& mode) {
  const bool known = std::find(kModes.begin(), kModes.end(), mode) != kModes.end();
  BANYAN_CHECK(known,
               "[actor.loss_agg_mode] wanted one of token-mean, token-sum, seq-mean-token-sum, "
               "seq-mean-token-sum-norm, seq-mean-token-mean, got '",
               mode,
               "'");
}

at::Tensor aggregation_weights(const LossTokens& tokens,
                               const std::string& mode,
                               const LossScale& scale) {
  check_aggregation_mode(mode);
  const at::Tensor mask = tokens.mask.to(at::kCPU, at::kDouble).contiguous();
  const double* m = mask.const_data_ptr<double>();
  at::Tensor weights = at::empty(mask.sizes(), mask.options());
  double* w = weights.mutable_data_ptr<double>();
  for (size_t s = 0; s + 1 < tokens.offsets.size(); ++s) {
    double n = 0.0;
    for (int64_t u = tokens.offsets[s]; u < tokens.offsets[s + 1]; ++u) n += m[u];
    double factor = 1.0;  // token-sum
    if (mode == "token-mean") factor = inverse(scale.num_tokens);
    if (mode == "seq-mean-token-sum") factor = inverse(scale.num_sequences);
    if (mode == "seq-mean-token-mean") factor = inverse(n * scale.num_sequences);
    if (mode == "seq-mean-token-sum-norm") {
      factor = inverse(scale.num_sequences * scale.sequence_norm);
    }
    for (int64_t u = tokens.offsets[s]; u < tokens.offsets[s + 1]; ++u) w[u] = m[u] * factor;
  }
  return weights;
}

}  // namespace detail

at::Tensor aggregate(const at::Tensor& per_token,
                     const LossTokens& tokens,
                     const std::string& mode,
                     const LossScale& scale) {
  const at::Tensor weights = detail::aggregation_weights(tokens, mode, scale);
  return (per_token * weights.to(per_token.device(), per_token.scalar_type())).sum();
}

}  // namespace banyan::algo
