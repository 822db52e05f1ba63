// The actor loss and its gradients. Aggregation is linear with known weights w, so the gradient is
// one vector-Jacobian product of the per-token objective
//   policy w - entropy_coeff H + kl_loss_coef KL
// seeded with w. All of it runs in fp64 on the CPU whatever the inputs are: the tensors hold one
// number per response token, and fp64 makes sums exact enough not to depend on how blocks were cut.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo {
namespace {

// A private fp64 copy in which uncounted tokens are 0, so that a NaN there cannot reach the
// gradient.
at::Tensor wide(const at::Tensor& values, const at::Tensor& counted) {
  const at::Tensor copy = values.detach().to(at::kCPU, at::kDouble);
  return at::where(counted, copy, at::zeros_like(copy));
}

LossTokens widen(const LossTokens& tokens) {
  LossTokens out;
  out.offsets = tokens.offsets;
  out.mask = tokens.mask.detach().to(at::kCPU, at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  const at::Tensor counted = out.mask != 0;
  out.log_prob = wide(tokens.log_prob, counted);
  out.advantage = wide(tokens.advantage, counted);
  out.old_log_prob =
      tokens.old_log_prob.defined() ? wide(tokens.old_log_prob, counted) : out.log_prob;
  if (tokens.entropy.defined()) out.entropy = wide(tokens.entropy, counted);
  if (tokens.weight.defined()) out.weight = wide(tokens.weight, counted);
  out.sequence = tokens.sequence;
  if (tokens.ref_log_prob.defined()) out.ref_log_prob = wide(tokens.ref_log_prob, counted);
  return out;
}

// Sum of a * b, one term after the other: the same bits for any number of threads.
double dot(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor left = a.contiguous();
  const at::Tensor right = b.contiguous();
  const double* x = left.const_data_ptr<double>();
  const double* y = right.const_data_ptr<double>();
  double sum = 0.0;
  for (int64_t u = 0; u < left.numel(); ++u) sum += x[u] * y[u];
  return sum;
}

void check_tokens(const LossTokens& tokens, const LossOptions& options) {
  const int64_t size = tokens.log_prob.numel();
  BANYAN_ASSERT(!tokens.offsets.empty() && tokens.offsets.back() == size &&
                    tokens.advantage.numel() == size && tokens.mask.numel() == size,
                "actor_loss: ",
                size,
                " log-probabilities, vectors of other lengths");
  BANYAN_ASSERT(options.entropy_coeff == 0.0 || tokens.entropy.defined(), "actor_loss: no entropy");
  BANYAN_ASSERT(!options.use_kl_loss || tokens.ref_log_prob.defined(), "actor_loss: no reference");
}

}  // namespace

LossResult actor_loss(const LossTokens& tokens,
                      const LossScale& scale,
                      const LossOptions& options) {
  check_tokens(tokens, options);
  const c10::InferenceMode normal_tensors(false);
  const at::AutoGradMode with_grad(true);
  const LossTokens in = widen(tokens);
  const at::Tensor log_prob = in.log_prob.detach().clone().requires_grad_(true);
  const PolicyLoss mode = policy_loss(options.loss_mode);
  PolicyLossResult policy = mode.function(in, log_prob, options);
  // In bypass mode the ratio already holds the correction (T35).
  if (in.weight.defined() && !mode.applies_weight && !(options.bypass_mode && mode.has_ratio)) {
    policy.loss = policy.loss * in.weight;
  }
  const at::Tensor x = detail::log_ratio(log_prob, in.old_log_prob);
  at::Tensor objective = policy.loss;
  at::Tensor kl;
  if (options.use_kl_loss) {
    kl = detail::kl_loss(options.kl_loss_type, log_prob, in.ref_log_prob, x);
    objective = objective + kl * options.kl_loss_coef;
  }

  const at::Tensor weights = detail::aggregation_weights(in, aggregation_mode(options), scale);
  LossResult result;
  if (log_prob.numel() > 0) {
    result.grad_log_prob = torch::autograd::grad({objective}, {log_prob}, {weights})[0];
  } else {
    result.grad_log_prob = at::zeros_like(log_prob).detach();
  }
  result.grad_log_prob = result.grad_log_prob.to(tokens.log_prob.options());

  LossMetrics& metrics = result.metrics;
  metrics.pg_loss = dot(policy.loss.detach(), weights);
  metrics.loss = metrics.pg_loss;
  if (kl.defined()) {
    metrics.kl_loss = dot(kl.detach(), weights);
    metrics.loss += options.kl_loss_coef * metrics.kl_loss;
  }
  if (in.entropy.defined()) {
    metrics.entropy_loss = dot(in.entropy, weights);
    metrics.entropy_sum = dot(in.entropy, in.mask);
  }
  if (options.entropy_coeff != 0.0) {
    metrics.loss -= options.entropy_coeff * metrics.entropy_loss;
    result.grad_entropy = (weights * -options.entropy_coeff).to(tokens.log_prob.options());
  }
  if (policy.clipped.defined()) metrics.clipped_tokens = dot(policy.clipped, in.mask);
  if (policy.clipped_lower.defined()) {
    metrics.clipped_lower_tokens = dot(policy.clipped_lower, in.mask);
  }
  metrics.extra = policy.metrics;
  metrics.neg_log_ratio_sum = -dot(x.detach(), in.mask);
  if (log_prob.numel() > 0) {
    const at::Tensor distance = at::abs(at::exp(x.detach()) - 1.0) * in.mask;
    metrics.max_abs_ratio_minus_one = distance.max().item<double>();
  }
  return result;
}

LossScale loss_scale(const LossTokens& tokens, double sequence_norm) {
  LossScale scale;
  scale.sequence_norm = sequence_norm;
  const at::Tensor mask = tokens.mask.to(at::kCPU, at::kDouble).contiguous();
  const double* m = mask.const_data_ptr<double>();
  for (size_t s = 0; s + 1 < tokens.offsets.size(); ++s) {
    double n = 0.0;
    for (int64_t u = tokens.offsets[s]; u < tokens.offsets[s + 1]; ++u) n += m[u];
    scale.num_tokens += n;
    scale.num_sequences += n > 0.0 ? 1.0 : 0.0;
  }
  return scale;
}

}  // namespace banyan::algo
