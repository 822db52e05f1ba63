#include "banyan/algo/sft_loss.h"

#include <ATen/ops/zeros.h>

#include "banyan/core/error.h"

namespace banyan::algo {

SftResult sft_loss(const at::Tensor& log_prob, const at::Tensor& weight, double num_tokens) {
  const int64_t size = log_prob.numel();
  BANYAN_ASSERT(!weight.defined() || weight.numel() == size, "sft_loss: ", size, " tokens");
  const at::Tensor values = log_prob.detach().to(at::kCPU, at::kDouble).contiguous();
  at::Tensor weights;
  if (weight.defined()) weights = weight.detach().to(at::kCPU, at::kDouble).contiguous();
  at::Tensor grad = at::zeros({size}, at::kDouble);
  const double* l = values.const_data_ptr<double>();
  const double* w = weights.defined() ? weights.const_data_ptr<double>() : nullptr;
  double* g = grad.mutable_data_ptr<double>();
  SftResult result;
  for (int64_t u = 0; u < size && num_tokens > 0.0; ++u) {
    const double share = (w == nullptr ? 1.0 : w[u]) / num_tokens;
    if (share == 0.0) continue;  // an uncounted token may hold anything
    result.loss -= share * l[u];
    g[u] = -share;
  }
  result.grad = grad.to(log_prob.options());
  return result;
}

}  // namespace banyan::algo
