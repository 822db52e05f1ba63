// Causal attention of the last n positions, per kv head: query rows of a group are stacked, [K, G
// n, D], so keys are never repeated. S = scale Q Kᵀ, P = e^(S - lse); backward dV = Pᵀ dO, dS = P
// (dO Vᵀ - delta), dQ = scale dS K, dK = scale dSᵀ Q with delta = rowsum(dO O).
#include "banyan/ops/detail/attention_aten.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>

#include <limits>

#include "banyan/ops/detail/dtype.h"

namespace banyan::ops::detail {
namespace {

// [n, H, D] -> [K, G * n, D] in the accumulate type; row g * n + i is query head (k, g) of token i.
at::Tensor stack_queries(const at::Tensor& x, int64_t kv_heads) {
  const int64_t n = x.size(0);
  const int64_t group = x.size(1) / kv_heads;
  return x.to(accumulate_type(x.scalar_type()))
      .reshape({n, kv_heads, group, x.size(2)})
      .permute({1, 2, 0, 3})
      .reshape({kv_heads, group * n, x.size(2)});
}

// The inverse, [K, G * n, D] -> [n, H, D].
at::Tensor unstack_queries(const at::Tensor& x, int64_t n) {
  const int64_t kv_heads = x.size(0);
  const int64_t group = x.size(1) / n;
  return x.reshape({kv_heads, group, n, x.size(2)})
      .permute({2, 0, 1, 3})
      .reshape({n, kv_heads * group, x.size(2)});
}

// [L, K, D] -> [K, L, D]
at::Tensor stack_keys(const at::Tensor& x) {
  return x.to(accumulate_type(x.scalar_type())).transpose(0, 1);
}

// [n, H] <-> [K, G * n, 1]
at::Tensor stack_rows(const at::Tensor& x, int64_t kv_heads) {
  return stack_queries(x.unsqueeze(-1), kv_heads);
}

// scale Q Kᵀ with -inf where a key stands after its query.
at::Tensor masked_scores(const at::Tensor& q, const at::Tensor& k, int64_t n, double scale) {
  const int64_t length = k.size(1);
  const int64_t group = q.size(1) / n;
  at::Tensor scores = at::matmul(q, k.transpose(1, 2)).mul_(scale);
  const at::Tensor key = at::arange(length, q.options().dtype(at::kLong));
  const at::Tensor last = at::arange(length - n, length, q.options().dtype(at::kLong));
  const at::Tensor hidden = key.unsqueeze(0).gt(last.unsqueeze(1));  // [n, L]
  scores.view({scores.size(0), group, n, length})
      .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  return scores;
}

}  // namespace

DenseAttention dense_attention(const at::Tensor& q,
                               const at::Tensor& k,
                               const at::Tensor& v,
                               double scale) {
  const int64_t n = q.size(0);
  const int64_t kv_heads = k.size(1);
  const at::Tensor scores = masked_scores(stack_queries(q, kv_heads), stack_keys(k), n, scale);
  const at::Tensor lse = at::logsumexp(scores, {-1}, /*keepdim=*/true);
  const at::Tensor out = at::matmul(scores.sub(lse).exp_(), stack_keys(v));
  DenseAttention result;
  result.out = unstack_queries(out, n).to(q.scalar_type());
  result.lse = unstack_queries(lse, n).squeeze(-1);
  return result;
}

DenseAttentionGradients dense_attention_backward(const at::Tensor& grad_out,
                                                 const at::Tensor& q,
                                                 const at::Tensor& k,
                                                 const at::Tensor& v,
                                                 const at::Tensor& out,
                                                 const at::Tensor& lse,
                                                 double scale) {
  const int64_t n = q.size(0);
  const int64_t kv_heads = k.size(1);
  const at::Tensor queries = stack_queries(q, kv_heads);
  const at::Tensor keys = stack_keys(k);
  const at::Tensor grad = stack_queries(grad_out, kv_heads);
  const at::Tensor probs =
      masked_scores(queries, keys, n, scale).sub_(stack_rows(lse, kv_heads)).exp_();
  const at::Tensor delta = grad.mul(stack_queries(out, kv_heads)).sum({-1}, /*keepdim=*/true);
  const at::Tensor grad_scores =
      at::matmul(grad, stack_keys(v).transpose(1, 2)).sub_(delta).mul_(probs).mul_(scale);
  DenseAttentionGradients result;
  result.dq = unstack_queries(at::matmul(grad_scores, keys), n);
  result.dk = at::matmul(grad_scores.transpose(1, 2), queries).transpose(0, 1);
  result.dv = at::matmul(probs.transpose(1, 2), grad).transpose(0, 1);
  return result;
}

}  // namespace banyan::ops::detail
